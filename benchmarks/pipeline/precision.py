"""What the trainers compute with on this processor, and what bfloat16 would cost."""

from __future__ import annotations

import time

import torch

from benchmarks import Row
from tinkex.pipeline.stage_setup import choose_dtype, has_bfloat16

_SIZE = 384


def measure_precision() -> Row:
    """Whatever is asked for, bfloat16 is used only where the processor has it."""
    device = torch.device("cpu")
    chosen = {choose_dtype(name, device) for name in ("auto", "float32", "bfloat16")}
    is_met = has_bfloat16(device) or chosen == {torch.float32}
    ours, other = (_speed(dtype) for dtype in (choose_dtype("auto", device), torch.bfloat16))
    name = "bfloat16 is not chosen on a CPU without it"
    said = "has it" if has_bfloat16(device) else "has none"
    return Row(
        name,
        f"{' or '.join(sorted(str(one).removeprefix('torch.') for one in chosen))}",
        f"CPU {said}",
        ours / other,
        "float32",
        is_met,
    )


def _speed(dtype: torch.dtype) -> float:
    """Products per second."""
    one = torch.ones(_SIZE, _SIZE, dtype=dtype)
    one @ one
    started = time.perf_counter()
    for _ in range(3):
        one @ one
    return 3.0 / (time.perf_counter() - started)
