"""Translates the RoPE settings of a GGUF file to those of config.json."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tinkex.engine.models.gguf.reader import GgufFile
from tinkex.engine.models.weight_files import UnusableModel

#: Holds the frequency factors of Llama 3; the file does not store the rule that produced them.
ROPE_FREQS_TENSOR = "rope_freqs.weight"
#: The constants of that rule; only the factor differs between models.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192


def read_rope_config(file: GgufFile, theta: float, head_size: int) -> dict[str, object]:
    """The fields `rope_theta` and, if the context was extended, `rope_scaling`."""
    config: dict[str, object] = {"rope_theta": theta}
    scaling = _read_rope_scaling(file, theta, head_size)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _read_rope_scaling(file: GgufFile, theta: float, head_size: int) -> dict[str, object] | None:
    arch = file.metadata["general.architecture"]
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    factor = file.metadata.get(f"{arch}.rope.scaling.factor", 0)
    scale = float(factor) if isinstance(factor, float | int) and factor > 0 else None
    if ROPE_FREQS_TENSOR in file.tensors:
        return _read_llama3_scaling(file, theta, head_size)
    if kind == "none":
        return None
    if kind == "linear" and scale is not None:
        return {"rope_type": "linear", "factor": scale}
    original = file.metadata.get(f"{arch}.rope.scaling.original_context_length")
    if kind == "yarn" and scale is not None and isinstance(original, int):
        return {
            "rope_type": "yarn",
            "factor": scale,
            "original_max_position_embeddings": original,
        }
    raise UnusableModel(
        f"{file.path} uses RoPE scaling {kind!r:.40} with factor {factor!r:.40}, which is not "
        "supported; supported are none, linear and yarn"
    )


def _read_llama3_scaling(file: GgufFile, theta: float, head_size: int) -> dict[str, object]:
    """Find the llama3 rule that gives exactly the factors of the file; raises if there is none."""
    stored = file.tensors[ROPE_FREQS_TENSOR]
    with file.path.open("rb") as content:
        content.seek(stored.offset)
        raw = np.frombuffer(content.read(stored.num_bytes), np.uint8)
    factors = stored.encoding.decode(raw.reshape(-1, stored.encoding.block_bytes)).ravel()
    factor = float(factors.max())
    expected = llama3_factors(factor, theta, head_size)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise UnusableModel(
            f"the tensor {ROPE_FREQS_TENSOR!r} of {file.path} is not a supported RoPE scaling; "
            "only that of Llama 3.1 and 3.2 is"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_CONTEXT,
    }


def llama3_factors(factor: float, theta: float, head_size: int) -> NDArray[np.float64]:
    """Divisor of each frequency: `factor` for low, 1 for high, interpolated between them."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    share = (_ORIGINAL_CONTEXT / wavelengths - _LOW_FREQ_FACTOR) / (
        _HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR
    )
    interpolated = 1 / ((1 - share) / factor + share)
    divisors = np.where(share < 0, factor, interpolated)
    return np.where(share > 1, 1.0, divisors)
