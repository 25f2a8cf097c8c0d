"""The header of a serialized tensor: a type byte, then the shape as varints."""

from __future__ import annotations

from tinkex.errors import InvalidInput

#: Marks a tensor whose cells are all equal; the header follows.
_CONSTANT_MARKER = 254
_LAST_DTYPE = 7


def read_tensor_shape(data: bytes) -> tuple[int, ...]:
    """The shape that a serialized tensor declares; its numbers are not read."""
    at = 1 if data[:1] == bytes([_CONSTANT_MARKER]) else 0
    if len(data) <= at:
        raise InvalidInput(f"a serialized tensor cannot end after {len(data)} bytes")
    if data[at] > _LAST_DTYPE:
        raise InvalidInput(f"a serialized tensor cannot have type {data[at]}")
    num_dims, at = _read_varint(data, at + 1)
    shape: list[int] = []
    for _ in range(num_dims):
        size, at = _read_varint(data, at)
        shape.append(size)
    return tuple(shape)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned number, seven bits per byte, and where the next one begins."""
    number = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise InvalidInput(f"a serialized tensor's header is cut off after {len(data)} bytes")
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise InvalidInput(f"a serialized tensor's size runs over 64 bits, near byte {at}")
