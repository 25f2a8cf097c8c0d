"""The compute dtype of the trainers on this CPU, and the speed of bfloat16."""

from __future__ import annotations

import time

import torch

from benchmarks import Row
from tinkex.pipeline.model import choose_dtype, has_bfloat16

_SIZE = 384


def measure_precision() -> Row:
    """Check that bfloat16 is used only if the CPU supports it."""
    device = torch.device("cpu")
    chosen = {choose_dtype(name, device) for name in ("auto", "float32", "bfloat16")}
    is_met = has_bfloat16(device) or chosen == {torch.float32}
    ours, other = (_speed(dtype) for dtype in (choose_dtype("auto", device), torch.bfloat16))
    name = "bfloat16 is not chosen on a CPU without it"
    support = "supports it" if has_bfloat16(device) else "does not support it"
    return Row(
        name,
        f"{' or '.join(sorted(str(dtype).removeprefix('torch.') for dtype in chosen))}",
        f"CPU {support}",
        ours / other,
        "float32",
        is_met,
    )


def _speed(dtype: torch.dtype) -> float:
    """Return matrix products per second."""
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    matrix @ matrix
    started = time.perf_counter()
    for _ in range(3):
        matrix @ matrix
    return 3.0 / (time.perf_counter() - started)
