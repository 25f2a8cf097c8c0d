"""A minimal protobuf codec: tags, varints and length-prefixed bytes, without copies.

The protocol has few, flat messages, and most of their bytes are tensors. The protobuf library
copies those bytes at every level; here a message is a list of buffers that are joined once.

A field is identified by its whole tag (number and wire type), so a known number with another wire
type is skipped like an unknown field. Repeated sub-messages are not merged: the last one wins.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

VARINT, FIXED64, LEN, START_GROUP, END_GROUP, FIXED32 = range(6)
_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
_MAX_SHIFT = 70
_MAX_TAG = 0xFFFF_FFFF
#: Maximum number of fields per message, so that a small body cannot create millions of objects.
MAX_FIELDS = 65_536
EMPTY = memoryview(b"")
_DOUBLE = struct.Struct("<d")

Buffer: TypeAlias = bytes | memoryview
#: Functions that decode the fields of a message, by tag.
Readers: TypeAlias = Mapping[int, Callable[[Any], Any]]
T = TypeVar("T")


class WireError(ValueError):
    """The bytes are not a valid message."""


def make_tag(number: int, wire_type: int) -> int:
    """Return the tag of a field."""
    return number << 3 | wire_type


MAP_KEY = make_tag(1, LEN)
MESSAGE_VALUE = make_tag(2, LEN)
DOUBLE_VALUE = make_tag(2, FIXED64)


def encode_varint(value: int) -> bytes:
    """Encode a varint; a negative value is encoded as its 64-bit complement in ten bytes."""
    value = int(value) & 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@lru_cache(maxsize=8192)
def encode_tag_and_number(tag_: int, number: int) -> bytes:
    """Encode a tag and a number: a varint field, or the start of a length-prefixed field."""
    return encode_varint(tag_) + encode_varint(number)


@lru_cache(maxsize=1024)
def encode_map_key(key: str) -> bytes:
    """Encode the key of an entry of a map<string, ...>."""
    text = key.encode()
    return encode_tag_and_number(MAP_KEY, len(text)) + text


class MessageWriter:
    """Builds a message as a list of buffers with their total size.

    As in proto3, a zero or empty field is omitted unless `present` is set.
    """

    __slots__ = ("parts", "size")

    def __init__(self) -> None:
        self.parts: list[Buffer] = []
        self.size = 0

    def raw(self, fields: bytes) -> None:
        """Append encoded fields."""
        self.parts.append(fields)
        self.size += len(fields)

    def number(self, tag_: int, value: int, *, present: bool = False) -> None:
        """Append an integer, enum or bool field."""
        if value or present:
            self.raw(encode_tag_and_number(tag_, value))

    def double(self, tag_: int, value: float) -> None:
        """Append a double field, always present."""
        self.raw(encode_varint(tag_) + _DOUBLE.pack(value))

    def payload(self, tag_: int, data: Buffer, *, present: bool = False) -> None:
        """Append a bytes field; a memoryview is kept, not copied, until `to_bytes`."""
        num_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
        if num_bytes or present:
            opening = encode_tag_and_number(tag_, num_bytes)
            self.parts += (opening, data)
            self.size += len(opening) + num_bytes

    def framed(self, opening: bytes, data: Buffer, closing: bytes = b"") -> None:
        """Append data between encoded bytes."""
        num_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
        self.parts += (opening, data, closing)
        self.size += len(opening) + num_bytes + len(closing)

    def text(self, tag_: int, value: str, *, present: bool = False) -> None:
        """Append a string field."""
        self.payload(tag_, value.encode(), present=present)

    def packed(self, tag_: int, values: Iterable[int]) -> None:
        """Append a repeated integer field, packed."""
        self.payload(tag_, b"".join(map(encode_varint, values)))

    def message(self, tag_: int, write: Callable[[MessageWriter, T], None], value: T) -> None:
        """Append the sub-message that `write` encodes, always present."""
        slot, start = len(self.parts), self.size
        self.parts.append(b"")
        write(self, value)
        # The length precedes the message but is known only after it.
        opening = encode_tag_and_number(tag_, self.size - start)
        self.parts[slot] = opening
        self.size += len(opening)

    def entries(
        self, tag_: int, write: Callable[[MessageWriter, T], None], entries: Mapping[str, T]
    ) -> None:
        """Append a map<string, ...>; `write` appends the value field, which has number 2."""

        def write_entry(writer: MessageWriter, entry: tuple[str, T]) -> None:
            writer.raw(encode_map_key(entry[0]))
            write(writer, entry[1])

        for entry in entries.items():
            self.message(tag_, write_entry, entry)

    def to_bytes(self) -> bytes:
        """Join the message; this is the only copy."""
        return b"".join(self.parts)


def write_double_value(entry: MessageWriter, value: float) -> None:
    """Append the value of an entry of a map<string, double>."""
    entry.double(DOUBLE_VALUE, value)


def read_fields(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield (tag, number, payload) of each field: the number of a varint, the payload of others.

    Groups are not used here; they are checked for balance and skipped.
    """
    position, end = 0, len(data)
    groups: list[int] = []
    num_left = MAX_FIELDS
    while position < end:
        num_left -= 1
        if num_left < 0:
            raise WireError(f"a message has more than {MAX_FIELDS} fields; send less at once")
        tag_ = data[position]
        position += 1
        if tag_ > 0x7F:
            tag_, position = read_varint(data, position - 1)
        wire_type = tag_ & 7
        if wire_type == LEN:
            number, start = read_varint(data, position)
            position = start + number
        elif wire_type == VARINT:
            number, start = read_varint(data, position)
            position = start
        else:
            number, start = 0, position
            position += _skipped_bytes(tag_, groups)
        if position > end:
            raise WireError(f"a field of {position - start} bytes has only {end - start} left")
        if not 8 <= tag_ <= _MAX_TAG:
            raise WireError(f"field number {tag_ >> 3} is not a valid one")
        if not groups:
            yield tag_, number, data[start:position]
    if groups:
        raise WireError(f"the message ends inside group {groups[-1]}")


def read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Read an unsigned 64-bit varint; returns its value and end position."""
    try:
        byte = data[position]
        value, shift = byte & 0x7F, 7
        while byte > 0x7F:
            position += 1
            byte = data[position]
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > _MAX_SHIFT:
                raise WireError("a number is longer than ten bytes")
    except IndexError:
        raise WireError("the message ends inside a number") from None
    return value & 0xFFFF_FFFF_FFFF_FFFF, position + 1


def _skipped_bytes(tag_: int, groups: list[int]) -> int:
    """Return the size of a fixed field, or 0 at the start or end of a group."""
    number, wire_type = tag_ >> 3, tag_ & 7
    if wire_type in _FIXED_BYTES:
        return _FIXED_BYTES[wire_type]
    if wire_type == START_GROUP:
        groups.append(number)
    elif wire_type != END_GROUP or not groups or groups.pop() != number:
        raise WireError(f"wire type {wire_type} of field {number} makes no sense here")
    return 0


def read_singular(data: memoryview, readers: Readers) -> dict[int, Any]:
    """Return the values of known fields by tag; the last one wins if a field is repeated.

    A reader gets the number of a varint and the payload of any other field.
    """
    values: dict[int, Any] = {}
    for tag_, number, payload in read_fields(data):
        if tag_ in readers:
            values[tag_] = readers[tag_](number if tag_ & 7 == VARINT else payload)
    return values


def read_oneof(data: memoryview, readers: Mapping[int, Callable[[memoryview], T]], what: str) -> T:
    """Return the value of a oneof message; the last field wins."""
    value: T | None = None
    for tag_, _, payload in read_fields(data):
        if tag_ in readers:
            value = readers[tag_](payload)
    if value is None:
        raise WireError(f"{what} is none of the things it may be")
    return value


def to_int64(number: int) -> int:
    """Read a varint as a signed 64-bit integer."""
    return number - (1 << 64) if number >> 63 else number


def to_int32(number: int) -> int:
    """Read a varint as a signed 32-bit integer or an enum: the low half, as in protobuf."""
    return ((number & 0xFFFF_FFFF) ^ 0x8000_0000) - 0x8000_0000


def to_uint32(number: int) -> int:
    """Read a varint as an unsigned 32-bit integer."""
    return number & 0xFFFF_FFFF


def to_payload(payload: memoryview) -> memoryview:
    """Return a bytes field or sub-message unchanged, without a copy."""
    return payload


def to_text(payload: memoryview) -> str:
    """Read a string field."""
    try:
        return str(payload, "utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"a text field is not UTF-8: {error}") from None


def to_double(payload: memoryview) -> float:
    """Read a double field; an empty payload is zero."""
    value: float = _DOUBLE.unpack(payload)[0] if payload else 0.0
    return value


def read_integers(tag_: int, number: int, payload: memoryview) -> list[int]:
    """Read one field of a repeated int64: one number, or several packed ones."""
    if tag_ & 7 == VARINT:
        return [to_int64(number)]
    values, position = list[int](), 0
    while position < len(payload):
        number, position = read_varint(payload, position)
        values.append(to_int64(number))
    return values


def read_map_entry(entry: memoryview, value_tag: int) -> tuple[str, memoryview]:
    """Return the key and the value's payload of a map entry; missing ones are empty."""
    fields = read_singular(entry, {MAP_KEY: to_text, value_tag: to_payload})
    return fields.get(MAP_KEY, ""), fields.get(value_tag, EMPTY)
