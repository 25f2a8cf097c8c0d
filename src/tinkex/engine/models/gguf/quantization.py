"""Dequantizes the tensor encodings of GGUF files.

Elements are stored in blocks; every function takes blocks as rows of bytes and returns rows of
float32. The arithmetic follows the format's definition, one float32 operation after another, so the
result is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# Shape letters in this file: N blocks, S bytes per block, B elements per block.
Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
_HALF = 16
_ONE, _FOUR = np.uint8(1), np.uint8(4)
_SUPERBLOCK = 256


@dataclass(frozen=True, slots=True)
class TensorEncoding:
    """One tensor encoding."""

    name: str
    block_size: int
    """The number of elements in a block."""
    block_bytes: int
    decode: Callable[[Bytes], Floats]
    is_plain: bool = False
    """Whether safetensors has the same format, so that the bytes can be copied."""

    @property
    def dtype(self) -> str:
        """The safetensors dtype that holds the values exactly."""
        return self.name if self.is_plain else "F32"


def _read_scale(x_NS: Bytes, start: int) -> Floats:
    """The float16 scale of every block, as a column."""
    return _view_as_floats(x_NS[:, start : start + 2], "<f2")


def _view_as_floats(x_NS: Bytes, dtype: str) -> Floats:
    return np.ascontiguousarray(x_NS).view(dtype).astype(np.float32)


def _nibbles(x_NS: Bytes) -> Bytes:
    """The low nibbles of all bytes, then the high nibbles."""
    return np.concatenate([x_NS & 0x0F, x_NS >> 4], axis=1)


def _fifth_bits(x_N4: Bytes) -> Bytes:
    """The fifth bit of each of 32 elements, shifted into place."""
    return np.unpackbits(x_N4, axis=1, bitorder="little") << _FOUR


# --- plain floats ---------------------------------------------------------------------------


def _f32(x_NS: Bytes) -> Floats:
    return _view_as_floats(x_NS, "<f4")


def _f16(x_NS: Bytes) -> Floats:
    return _view_as_floats(x_NS, "<f2")


def _bf16(x_NS: Bytes) -> Floats:
    upper: NDArray[np.uint16] = np.ascontiguousarray(x_NS).view("<u2")
    return (upper.astype(np.uint32) << 16).view(np.float32)


# --- blocks of 32 ---------------------------------------------------------------------------


def _q4_0(x_NS: Bytes) -> Floats:
    q_NB = _nibbles(x_NS[:, 2:]).astype(np.int8) - 8
    return _read_scale(x_NS, 0) * q_NB.astype(np.float32)


def _q4_1(x_NS: Bytes) -> Floats:
    q_NB = _nibbles(x_NS[:, 4:]).astype(np.float32)
    return _read_scale(x_NS, 0) * q_NB + _read_scale(x_NS, 2)


def _q5_0(x_NS: Bytes) -> Floats:
    q_NB = (_nibbles(x_NS[:, 6:]) | _fifth_bits(x_NS[:, 2:6])).astype(np.int8) - 16
    return _read_scale(x_NS, 0) * q_NB.astype(np.float32)


def _q5_1(x_NS: Bytes) -> Floats:
    q_NB = _nibbles(x_NS[:, 8:]) | _fifth_bits(x_NS[:, 4:8])
    return _read_scale(x_NS, 0) * q_NB.astype(np.float32) + _read_scale(x_NS, 2)


def _q8_0(x_NS: Bytes) -> Floats:
    return _read_scale(x_NS, 0) * _view_as_floats(x_NS[:, 2:], "i1")


# --- k-quants: superblocks of 256 with a scale per sub-block --------------------------------


def _six_bit_scales(x_NS: Bytes) -> tuple[Floats, Floats]:
    """Unpack eight 6-bit scales and eight 6-bit minima from twelve bytes."""
    first, second, third = x_NS[:, :4], x_NS[:, 4:8], x_NS[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _dequantize_k_blocks(x_NS: Bytes, q_N8P: Bytes) -> Floats:
    scales, minima = _six_bit_scales(x_NS[:, 4:16])
    scales, minima = _read_scale(x_NS, 0) * scales, _read_scale(x_NS, 2) * minima
    values: Floats = scales[..., None] * q_N8P.astype(np.float32) - minima[..., None]
    return values.reshape(-1, _SUPERBLOCK)


def _q4_k(x_NS: Bytes) -> Floats:
    packed = x_NS[:, 16:].reshape(-1, 4, 1, 32)
    return _dequantize_k_blocks(x_NS, _split_nibbles(packed).reshape(-1, 8, 32))


def _q5_k(x_NS: Bytes) -> Floats:
    lower = _split_nibbles(x_NS[:, 48:].reshape(-1, 4, 1, 32)).reshape(-1, 8, 32)
    upper = x_NS[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & _ONE
    return _dequantize_k_blocks(x_NS, lower | upper << _FOUR)


def _split_nibbles(packed: Bytes) -> Bytes:
    """The low and high nibbles, along the second-to-last axis."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-2)


def _q6_k(x_NS: Bytes) -> Floats:
    lower = x_NS[:, :128].reshape(-1, 2, 1, 64)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    upper = x_NS[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    q = _split_nibbles(lower).reshape(-1, 2, 4, 32) | upper << 4
    q_NP = q.reshape(-1, _HALF, _HALF).astype(np.int8) - 32
    scales = _read_scale(x_NS, 208) * _view_as_floats(x_NS[:, 192:208], "i1")
    values: Floats = scales[..., None] * q_NP.astype(np.float32)
    return values.reshape(-1, _SUPERBLOCK)


#: All supported encodings, by their id in the file.
ENCODINGS = MappingProxyType(
    {
        0: TensorEncoding("F32", 1, 4, _f32, is_plain=True),
        1: TensorEncoding("F16", 1, 2, _f16, is_plain=True),
        30: TensorEncoding("BF16", 1, 2, _bf16, is_plain=True),
        2: TensorEncoding("Q4_0", 32, 18, _q4_0),
        3: TensorEncoding("Q4_1", 32, 20, _q4_1),
        6: TensorEncoding("Q5_0", 32, 22, _q5_0),
        7: TensorEncoding("Q5_1", 32, 24, _q5_1),
        8: TensorEncoding("Q8_0", 32, 34, _q8_0),
        12: TensorEncoding("Q4_K", 256, 144, _q4_k),
        13: TensorEncoding("Q5_K", 256, 176, _q5_k),
        14: TensorEncoding("Q6_K", 256, 210, _q6_k),
    }
)
_UNSUPPORTED_NAMES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


def encoding_name(type_id: int) -> str:
    """The name of an unsupported encoding."""
    return _UNSUPPORTED_NAMES.get(type_id, f"type {type_id}")
