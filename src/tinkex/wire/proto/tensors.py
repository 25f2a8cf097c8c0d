"""Protobuf codec of tensors, of columns of results, and of raw arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from tinkex.types.tensors import TensorData, TensorDtype
from tinkex.wire.proto.protobuf import (
    EMPTY,
    LEN,
    VARINT,
    MessageWriter,
    WireError,
    make_tag,
    read_fields,
    read_integers,
    read_singular,
    to_int32,
    to_payload,
)

if TYPE_CHECKING:
    from tinkex.types.arrays import Array

# Tensor
DENSE = make_tag(1, LEN)
SPARSE_CSR = make_tag(2, LEN)
DTYPE = make_tag(3, VARINT)
SHAPE = make_tag(4, LEN)
SHAPE_UNPACKED = make_tag(4, VARINT)
# SparseCsr
VALUES = make_tag(1, LEN)
CROW_INDICES = make_tag(2, LEN)
COL_INDICES = make_tag(3, LEN)
# BatchedTensor; its dtype and trailing shape are numbered like those of Tensor
DATA = make_tag(1, LEN)
OFFSETS = make_tag(2, LEN)


class WireDtype(NamedTuple):
    """A number format on the wire, and its dtype in memory."""

    on_wire: str
    num_bytes: int
    dtype: TensorDtype


FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
WIRE_DTYPES = {
    FLOAT32: WireDtype("<f4", 4, "float32"),
    INT64: WireDtype("<i8", 8, "int64"),
    INT32: WireDtype("<i4", 4, "int64"),
    BFLOAT16: WireDtype("<u2", 2, "float32"),
}
#: NumPy's limit; it also bounds the time to multiply the sizes.
MAX_DIMENSIONS = 64
DTYPE_CODES = {"float32": FLOAT32, "int64": INT64}


def wire_dtype(code: int, what: str) -> WireDtype:
    """Return the format of a DType; `what`, here and below, names the value in errors."""
    try:
        return WIRE_DTYPES[code]
    except KeyError:
        raise WireError(f"{what} has the unknown dtype {code}") from None


def check_rank(shape: Sequence[int], what: str) -> None:
    """Refuse a shape with too many dimensions, before its sizes are multiplied."""
    if len(shape) > MAX_DIMENSIONS:
        raise WireError(f"{what} has {len(shape)} dimensions; {MAX_DIMENSIONS} is the most")


def array_bytes(array: Array) -> memoryview:
    """Return the array's memory, or that of a copy if it is not contiguous."""
    return array.data if array.flags.c_contiguous else array.copy(order="C").data


def copy_array(payload: memoryview, on_wire: str, num_bytes: int, what: str) -> Array:
    """Copy a payload to a flat writable array of numbers of `num_bytes` each."""
    import numpy as np

    if len(payload) % num_bytes:
        raise WireError(f"{what} has {len(payload)} bytes, not a multiple of {num_bytes}")
    return np.frombuffer(bytearray(payload), on_wire)


def read_array(payload: memoryview, code: int, what: str) -> Array:
    """Copy a payload to a flat writable array; int32 becomes int64, bfloat16 float32."""
    layout = wire_dtype(code, what)
    array = copy_array(payload, layout.on_wire, layout.num_bytes, what)
    if code == BFLOAT16:
        # A bfloat16 is the upper half of a float32.
        return (array.astype("u4") << 16).view(layout.dtype)
    return array.astype(layout.dtype, copy=False)


def write_tensor(message: MessageWriter, tensor: TensorData) -> None:
    """Encode a Tensor."""
    if tensor.is_sparse:
        message.message(SPARSE_CSR, _write_csr, tensor)
    else:
        message.payload(DENSE, array_bytes(tensor.array), present=True)
    message.raw(encode_dtype_and_shape(tensor.dtype, tuple(tensor.shape)))


def _write_csr(message: MessageWriter, tensor: TensorData) -> None:
    tags = (VALUES, CROW_INDICES, COL_INDICES)
    for tag_, array in zip(tags, (tensor.array, tensor.crow_array, tensor.col_array), strict=True):
        if array is not None:
            message.payload(tag_, array_bytes(array))


@lru_cache(maxsize=1024)
def encode_dtype_and_shape(dtype: TensorDtype, shape: tuple[int, ...]) -> bytes:
    """Encode the fields that follow the numbers of a Tensor."""
    fields = MessageWriter()
    fields.number(DTYPE, DTYPE_CODES[dtype])
    fields.packed(SHAPE, shape)
    return fields.to_bytes()


def read_tensor(data: memoryview, what: str) -> TensorData:
    """Decode a Tensor; a sparse one stays sparse."""
    dense, csr, code = EMPTY, None, 0
    shape: list[int] = []
    for tag_, number, payload in read_fields(data):
        if tag_ == DENSE:
            dense, csr = payload, None
        elif tag_ == SPARSE_CSR:
            csr = payload
        elif tag_ == DTYPE:
            code = to_int32(number)
        elif tag_ in (SHAPE, SHAPE_UNPACKED):
            shape += read_integers(tag_, number, payload)
    check_rank(shape, what)
    if csr is not None:
        return _read_csr(csr, code, shape, what)
    values = read_array(dense, code, what)
    # A missing shape means a scalar or an unknown shape.
    known_shape = shape if shape or values.size == 1 else None
    return _checked_tensor(what, values, WIRE_DTYPES[code].dtype, known_shape)


def _read_csr(data: memoryview, code: int, shape: list[int], what: str) -> TensorData:
    tags = (VALUES, CROW_INDICES, COL_INDICES)
    fields = read_singular(data, dict.fromkeys(tags, to_payload))
    values, crow, cols = (fields.get(tag_, EMPTY) for tag_ in tags)
    return _checked_tensor(
        what,
        read_array(values, code, what),
        WIRE_DTYPES[code].dtype,
        shape,
        read_array(crow, INT64, f"{what}'s row pointers"),
        read_array(cols, INT64, f"{what}'s column numbers"),
    )


def _checked_tensor(
    what: str,
    values: Array,
    dtype: TensorDtype,
    shape: list[int] | None,
    crow: Array | None = None,
    cols: Array | None = None,
) -> TensorData:
    """Build a TensorData; its ValueError becomes a WireError."""
    try:
        return TensorData(values, dtype, shape, crow, cols)
    except ValueError as error:
        raise WireError(f"{what} is not a valid tensor: {error}") from None


def write_column(message: MessageWriter, tensors: Sequence[TensorData]) -> None:
    """Encode one field of many datums, which differ only in length, as a BatchedTensor."""
    import numpy as np

    # A scalar has no first dimension, so it becomes an array of one number.
    arrays = [np.atleast_1d(tensor.to_numpy()) for tensor in tensors]
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
    message.payload(DATA, b"".join(map(array_bytes, arrays)))
    message.payload(OFFSETS, offsets.data)
    message.raw(encode_dtype_and_shape(tensors[0].dtype, arrays[0].shape[1:]))


def read_column(data: memoryview, what: str) -> list[TensorData]:
    """Decode a BatchedTensor; the tensors are views of one copy of its data."""
    parts = dict.fromkeys((DATA, OFFSETS), EMPTY)
    code, trailing_shape = 0, list[int]()
    for tag_, number, payload in read_fields(data):
        if tag_ in parts:
            parts[tag_] = payload
        elif tag_ == DTYPE:
            code = to_int32(number)
        elif tag_ in (SHAPE, SHAPE_UNPACKED):
            trailing_shape += read_integers(tag_, number, payload)
    check_rank(trailing_shape, what)
    cells = _shape_cells(read_array(parts[DATA], code, what), trailing_shape, what)
    offsets = read_array(parts[OFFSETS], INT64, f"{what}'s offsets")
    cell_bytes = prod(trailing_shape) * WIRE_DTYPES[code].num_bytes
    bounds = _cell_bounds(offsets, cell_bytes, len(parts[DATA]), what)
    return [TensorData.from_numpy(cells[start:end]) for start, end in pairwise(bounds)]


def _shape_cells(values: Array, trailing_shape: list[int], what: str) -> Array:
    """Reshape values to cells of the trailing shape."""
    width = prod(trailing_shape)
    try:
        return values.reshape(values.size // width if width > 0 else 0, *trailing_shape)
    except ValueError:
        raise WireError(
            f"{what} has {values.size} values, which do not fill cells of shape {trailing_shape}"
        ) from None


def _cell_bounds(offsets: Array, cell_bytes: int, num_bytes: int, what: str) -> list[int]:
    """Convert byte offsets to cell numbers; refuse invalid offsets."""
    if offsets.size == 0:
        return []
    # Compared, not subtracted: forged offsets could wrap around.
    if offsets[0] < 0 or offsets[-1] > num_bytes or (offsets[1:] < offsets[:-1]).any():
        raise WireError(f"{what} has offsets that do not rise from 0 to {num_bytes}")
    # Without data all offsets are zero, regardless of the cell size.
    unit = cell_bytes if num_bytes else 1
    if (offsets % unit).any():
        raise WireError(f"{what} has offsets that are not multiples of {unit} bytes")
    bounds: list[int] = (offsets // unit).tolist()
    return bounds
