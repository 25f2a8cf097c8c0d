"""NumPy checks and conversions of TensorData.

Only tensors.py imports this module, lazily, so that `import tinkex.types` does not load NumPy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np  # noqa: TID253 - this whole file is imported late
import numpy.typing as npt  # noqa: TID253

from tinkex.errors import InvalidInput

Array: TypeAlias = npt.NDArray[Any]
Indices: TypeAlias = npt.NDArray[np.int64]
WireDtypeName: TypeAlias = Literal["int64", "float32"]
_MAX_SIZE = 2**31
_PACK_CODE = {"int64": "q", "float32": "f"}


def as_array(name: str, data: object, dtype: WireDtypeName) -> Array:
    """Return an array of this dtype; an array that already has it is not copied."""
    if isinstance(data, np.ndarray):
        return data if data.dtype == dtype else _cast(name, data, dtype)
    if data is None:
        return np.empty(0, dtype=dtype)
    packed = _pack(data, dtype) if isinstance(data, list | tuple) else None
    if packed is not None:
        return np.frombuffer(packed, dtype=dtype)
    return _cast(name, _numeric_array(name, data), dtype)


def infer_array(name: str, data: Sequence[object]) -> Array:
    """Return an int64 array if all numbers are integers, else float32."""
    packed = _pack(data, "int64")
    if packed is not None:
        return np.frombuffer(packed, dtype=np.int64)
    array = _numeric_array(name, data)
    return _cast(name, array, "int64" if array.dtype.kind in "iu" else "float32")


def _pack(data: Sequence[object], dtype: WireDtypeName) -> bytearray | None:
    """Pack a flat list to bytes; None if it is nested or does not fit the dtype.

    Packing is twice as fast as NumPy's conversion of a list, and as strict as needed.
    """
    packed = bytearray(len(data) * struct.calcsize(_PACK_CODE[dtype]))
    try:
        struct.pack_into(f"{len(data)}{_PACK_CODE[dtype]}", packed, 0, *data)
    except (struct.error, OverflowError, TypeError, ValueError):
        return None
    return packed


def _numeric_array(name: str, data: object) -> Array:
    try:
        array = np.asarray(data)
    except (ValueError, TypeError, OverflowError):
        raise InvalidInput(
            f"{name} must be numbers in rows of equal length, got {data!r:.80}"
        ) from None
    if array.size == 0:
        return array.astype(np.float32)
    if array.dtype.kind not in "fiub":
        raise InvalidInput(f"{name} must be numbers in rows of equal length, got {data!r:.80}")
    return array


def _cast(name: str, array: Array, dtype: WireDtypeName) -> Array:
    """Convert an array; refuse values that the dtype cannot hold."""
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise InvalidInput(f"{name} has dtype {array.dtype}; expected floats or integers")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    if dtype == "int64" and array.dtype.kind in "fu" and (cast != array).any():
        wrong = cast != array
        value = array[wrong].flat[0]
        raise InvalidInput(f"{name}{first_position(wrong)} is {value}, which int64 cannot hold")
    return cast


def first_position(mask: Array) -> str:
    """Return the first true position of a mask as an index: `[3]` or `[0, 3]`."""
    position = np.unravel_index(int(mask.argmax()), mask.shape)
    return f"[{', '.join(str(int(number)) for number in position)}]"


def dtype_of(array: Array) -> WireDtypeName:
    """Return the tensor dtype of an array; unsigned integers and booleans have none."""
    if not isinstance(array, np.ndarray):
        raise InvalidInput(f"expected a numpy array, got {array!r:.80}")
    kind = array.dtype.kind
    if kind == "f" or array.dtype.name == "bfloat16":
        return "float32"
    if kind == "i":
        return "int64"
    raise InvalidInput(
        f"an array of {array.dtype} has no tensor type; convert it to float32 or int64"
    )


def find_not_finite(
    values: Array, crow: Indices | None, cols: Indices | None
) -> tuple[str, float] | None:
    """Return the dense position and value of the first NaN or infinity, or None."""
    if values.dtype.kind != "f":
        return None
    finite = np.isfinite(values)
    if finite.all():
        return None
    at = int((~finite).argmax())
    if crow is None or cols is None:
        return first_position(~finite), float(values.flat[at])
    return f"[{row_indices(crow)[at]}, {cols[at]}]", float(values[at])


def arrays_equal(one: Array | None, other: Array | None) -> bool:
    """Return whether two arrays are equal; NaN equals NaN."""
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape as integers; refuse invalid ones."""
    try:
        sizes = tuple(map(index, shape))
    except TypeError:
        raise InvalidInput(f"shape is {shape!r:.80}; expected a list of sizes") from None
    if sizes and min(sizes) < 0:
        raise InvalidInput(f"shape is {list(sizes)}; sizes are never negative")
    return sizes


def reshape_checked(array: Array, sizes: tuple[int, ...]) -> Array:
    """Reshape an array; refuse a shape that does not fit."""
    if array.shape == sizes:
        return array
    # An empty array fits any size, but NumPy's sizes are limited to int64.
    if prod(sizes) != array.size or max(sizes, default=0) > _MAX_SIZE:
        raise InvalidInput(f"shape {list(sizes)} does not fit {array.size} numbers")
    return array.reshape(sizes)


def as_indices(name: str, indices: object) -> Indices:
    """Return CSR indices as an int64 array; refuse missing ones."""
    if indices is None:
        raise InvalidInput(f"{name} is missing; a CSR tensor needs rows and columns together")
    return as_array(name, indices, "int64")


def check_csr(values: Array, sizes: tuple[int, ...], crow: Indices, cols: Indices) -> None:
    """Refuse row pointers and columns that do not describe a matrix of this shape."""
    if len(sizes) != 2:
        raise InvalidInput(f"a CSR tensor needs a shape of rows and columns, got {list(sizes)}")
    num_rows, num_cols = sizes
    if crow.shape != (num_rows + 1,):
        raise InvalidInput(
            f"sparse_crow_indices has {crow.size} entries; {num_rows} rows need {num_rows + 1}"
        )
    if cols.shape != values.shape:
        raise InvalidInput(f"sparse_col_indices has {cols.size} entries for {values.size} numbers")
    # Compared, not subtracted: forged row pointers could wrap around.
    if crow[0] != 0 or crow[-1] != values.size or (crow[1:] < crow[:-1]).any():
        raise InvalidInput(
            f"sparse_crow_indices must rise from 0 to {values.size}, got {crow.tolist()!r:.80}"
        )
    if cols.size and (cols.min() < 0 or cols.max() >= num_cols):
        worst = cols[(cols < 0) | (cols >= num_cols)][0]
        raise InvalidInput(f"sparse_col_indices has {worst}; columns go from 0 to {num_cols - 1}")


def row_indices(crow: Indices) -> Indices:
    """Return the row of every listed value."""
    return np.repeat(np.arange(crow.size - 1), np.diff(crow))


def densify(values: Array, shape: Sequence[int], crow: Indices, cols: Indices, pad: int) -> Array:
    """Convert a CSR tensor to a dense matrix."""
    dense = np.full(tuple(shape), pad, dtype=values.dtype)
    dense[row_indices(crow), cols] = values
    return dense


def sparsify(array: Array, pad: int) -> tuple[Array, Indices, Indices] | None:
    """Return values, row pointers and columns of cells other than `pad`; None if not smaller."""
    listed = array != pad
    num_rows, num_cols = array.shape
    if num_rows + 1 + 2 * int(np.count_nonzero(listed)) >= num_rows * num_cols:
        return None
    crow = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(listed.sum(axis=1), out=crow[1:])
    return array[listed], crow, np.nonzero(listed)[1].astype(np.int64)


def check_pad(pad_value: object) -> int:
    """Return the pad value as an int; other types would not be exact in int64."""
    if isinstance(pad_value, bool) or not isinstance(pad_value, SupportsIndex):
        raise InvalidInput(f"pad_value is {pad_value!r}; expected an integer")
    return int(pad_value)
