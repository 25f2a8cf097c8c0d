"""How tensors are packed in GGUF files, and the numbers that the packed bytes stand for.

Numbers lie in blocks; every function takes blocks as rows of bytes and gives rows of float32. The
arithmetic is that of the format's definition, one float32 operation after another, so the result
is not near the stored numbers: it is those numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# Shape letters in this file: N blocks, S bytes of a block, B numbers of a block.
Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
_HALF = 16
_ONE, _FOUR = np.uint8(1), np.uint8(4)
_SUPER = 256


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to store numbers."""

    name: str
    block: int
    """How many numbers a block has."""
    block_bytes: int
    decode: Callable[[Bytes], Floats]
    is_plain: bool = False
    """Whether the bytes are numbers of the same name in safetensors, and can be copied."""

    @property
    def dtype(self) -> str:
        """What safetensors calls the type that loses nothing."""
        return self.name if self.is_plain else "F32"


def _scale(x_NS: Bytes, start: int) -> Floats:
    """A float16 of every block, as a column."""
    return _read(x_NS[:, start : start + 2], "<f2")


def _read(x_NS: Bytes, dtype: str) -> Floats:
    seen: NDArray[Any] = np.ascontiguousarray(x_NS).view(dtype)
    return seen.astype(np.float32)


def _nibbles(x_NS: Bytes) -> Bytes:
    """First the lower halves of all bytes, then the upper ones."""
    return np.concatenate([x_NS & 0x0F, x_NS >> 4], axis=1)


def _fifth_bits(x_N4: Bytes) -> Bytes:
    """One bit for each of 32 numbers, where it belongs."""
    return np.unpackbits(x_N4, axis=1, bitorder="little") << _FOUR


# --- plain numbers --------------------------------------------------------------------------


def _f32(x_NS: Bytes) -> Floats:
    return _read(x_NS, "<f4")


def _f16(x_NS: Bytes) -> Floats:
    return _read(x_NS, "<f2")


def _bf16(x_NS: Bytes) -> Floats:
    upper: NDArray[np.uint16] = np.ascontiguousarray(x_NS).view("<u2")
    return (upper.astype(np.uint32) << 16).view(np.float32)


# --- blocks of 32 ---------------------------------------------------------------------------


def _q4_0(x_NS: Bytes) -> Floats:
    q_NB = _nibbles(x_NS[:, 2:]).astype(np.int8) - 8
    return _scale(x_NS, 0) * q_NB.astype(np.float32)


def _q4_1(x_NS: Bytes) -> Floats:
    q_NB = _nibbles(x_NS[:, 4:]).astype(np.float32)
    return _scale(x_NS, 0) * q_NB + _scale(x_NS, 2)


def _q5_0(x_NS: Bytes) -> Floats:
    q_NB = (_nibbles(x_NS[:, 6:]) | _fifth_bits(x_NS[:, 2:6])).astype(np.int8) - 16
    return _scale(x_NS, 0) * q_NB.astype(np.float32)


def _q5_1(x_NS: Bytes) -> Floats:
    q_NB = _nibbles(x_NS[:, 8:]) | _fifth_bits(x_NS[:, 4:8])
    return _scale(x_NS, 0) * q_NB.astype(np.float32) + _scale(x_NS, 2)


def _q8_0(x_NS: Bytes) -> Floats:
    return _scale(x_NS, 0) * _read(x_NS[:, 2:], "i1")


# --- blocks of 256, in parts with scales of their own ---------------------------------------


def _six_bit_scales(x_NS: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and eight minima of six bits each, from twelve bytes."""
    first, second, third = x_NS[:, :4], x_NS[:, 4:8], x_NS[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _by_parts(x_NS: Bytes, q_N8P: Bytes) -> Floats:
    scales, minima = _six_bit_scales(x_NS[:, 4:16])
    scales, minima = _scale(x_NS, 0) * scales, _scale(x_NS, 2) * minima
    numbers: Floats = scales[..., None] * q_N8P.astype(np.float32) - minima[..., None]
    return numbers.reshape(-1, _SUPER)


def _q4_k(x_NS: Bytes) -> Floats:
    packed = x_NS[:, 16:].reshape(-1, 4, 1, 32)
    return _by_parts(x_NS, _two_fours(packed).reshape(-1, 8, 32))


def _q5_k(x_NS: Bytes) -> Floats:
    lower = _two_fours(x_NS[:, 48:].reshape(-1, 4, 1, 32)).reshape(-1, 8, 32)
    upper = x_NS[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & _ONE
    return _by_parts(x_NS, lower | upper << _FOUR)


def _two_fours(packed: Bytes) -> Bytes:
    """Both halves of bytes, along the side before the last."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-2)


def _q6_k(x_NS: Bytes) -> Floats:
    lower = x_NS[:, :128].reshape(-1, 2, 1, 64)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    upper = x_NS[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    q = _two_fours(lower).reshape(-1, 2, 4, 32) | upper << 4
    q_NP = q.reshape(-1, _HALF, _HALF).astype(np.int8) - 32
    scales = _scale(x_NS, 208) * _read(x_NS[:, 192:208], "i1")
    numbers: Floats = scales[..., None] * q_NP.astype(np.float32)
    return numbers.reshape(-1, _SUPER)


#: Every encoding that is read, by its number in the file.
ENCODINGS = MappingProxyType(
    {
        0: Encoding("F32", 1, 4, _f32, is_plain=True),
        1: Encoding("F16", 1, 2, _f16, is_plain=True),
        30: Encoding("BF16", 1, 2, _bf16, is_plain=True),
        2: Encoding("Q4_0", 32, 18, _q4_0),
        3: Encoding("Q4_1", 32, 20, _q4_1),
        6: Encoding("Q5_0", 32, 22, _q5_0),
        7: Encoding("Q5_1", 32, 24, _q5_1),
        8: Encoding("Q8_0", 32, 34, _q8_0),
        12: Encoding("Q4_K", 256, 144, _q4_k),
        13: Encoding("Q5_K", 256, 176, _q5_k),
        14: Encoding("Q6_K", 256, 210, _q6_k),
    }
)
_OTHERS = {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 28: "F64", 34: "TQ1_0", 35: "TQ2_0"}
_OTHERS |= {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"}
_OTHERS |= {22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 39: "MXFP4"}


def name_of(kind: int) -> str:
    """What a type of tensors is called, also one that is not read."""
    return _OTHERS.get(kind, f"type {kind}")
