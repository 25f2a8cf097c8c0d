"""How a model of a GGUF file tells positions apart, in the words of config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.engine.models.gguf.reader import GgufFile
from tinkex.engine.models.weight_files import UnusableModel

#: The tensor in which a file has the factors of Llama 3, and not the rule that made them.
ROPE_FREQS_TENSOR = "rope_freqs.weight"
#: The rule's numbers, the same in all models of the family except for the factor.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192


def read_rope_config(file: GgufFile, theta: float, head_size: int) -> dict[str, Any]:
    """The fields `rope_theta` and, if the positions are stretched, `rope_scaling`."""
    found: dict[str, Any] = {"rope_theta": theta}
    scaling = _read_rope_scaling(file, theta, head_size)
    return found | ({"rope_scaling": scaling} if scaling else {})


def _read_rope_scaling(file: GgufFile, theta: float, head_size: int) -> dict[str, Any] | None:
    arch = file.metadata["general.architecture"]
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    factor = file.metadata.get(f"{arch}.rope.scaling.factor", 0)
    is_told = isinstance(factor, float | int) and factor > 0
    if ROPE_FREQS_TENSOR in file.tensors:
        return _read_llama3_scaling(file, theta, head_size)
    if kind == "none":
        return None
    if kind == "linear" and is_told:
        return {"rope_type": "linear", "factor": float(factor)}
    original = file.metadata.get(f"{arch}.rope.scaling.original_context_length")
    if kind == "yarn" and is_told and isinstance(original, int):
        return {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": original,
        }
    raise UnusableModel(
        f"{file.path} stretches positions by {kind!r:.40} with factor {factor!r:.40}, which is "
        "not converted; none, linear and yarn are"
    )


def _read_llama3_scaling(file: GgufFile, theta: float, head_size: int) -> dict[str, Any]:
    """The rule that gives the very factors of the file; raises if they are of another rule."""
    stored = file.tensors[ROPE_FREQS_TENSOR]
    with file.path.open("rb") as content:
        content.seek(stored.offset)
        raw = np.frombuffer(content.read(stored.num_bytes), np.uint8)
    factors = stored.encoding.decode(raw.reshape(-1, stored.encoding.block_bytes)).ravel()
    factor = float(factors.max())
    expected = llama3_factors(factor, theta, head_size)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise UnusableModel(
            f"the tensor {ROPE_FREQS_TENSOR!r} of {file.path} stretches positions in a way that "
            "is not "
            "known; only that of Llama 3.1 and 3.2 is converted"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_CONTEXT,
    }


def llama3_factors(factor: float, theta: float, head_size: int) -> NDArray[np.float64]:
    """By how much each frequency is slowed: slow ones by all, fast ones not, those between some."""
    waves = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    share = (_ORIGINAL_CONTEXT / waves - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR)
    between = 1 / ((1 - share) / factor + share)
    slowed = np.where(share < 0, factor, between)
    return np.where(share > 1, 1.0, slowed)
