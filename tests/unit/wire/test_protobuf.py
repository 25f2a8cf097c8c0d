"""The protobuf wire format: valid fields are read, invalid ones are refused."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.wire.proto.protobuf import (
    FIXED32,
    FIXED64,
    LEN,
    VARINT,
    MessageWriter,
    Readers,
    WireError,
    encode_varint,
    make_tag,
    read_fields,
    read_integers,
    read_oneof,
    read_singular,
    read_varint,
    to_double,
    to_int32,
    to_int64,
    to_text,
    to_uint32,
)


def fields(data: bytes) -> list[tuple[int, int, bytes]]:
    return [
        (tag_, number, bytes(payload)) for tag_, number, payload in read_fields(memoryview(data))
    ]


@settings(derandomize=True)
@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_varint_round_trip(value: int) -> None:
    number, end = read_varint(memoryview(encode_varint(value)), 0)
    assert number == value % (1 << 64)
    assert end == len(encode_varint(value)) <= 10


def test_varint_bytes_match_the_specification() -> None:
    assert encode_varint(150) == b"\x96\x01"
    assert encode_varint(-2) == b"\xfe" + b"\xff" * 8 + b"\x01"


def test_overlong_varints_are_read() -> None:
    assert fields(b"\x88\x80\x00\x81\x80\x00") == [(8, 1, b"")]


def test_varint_of_more_than_ten_bytes_is_refused() -> None:
    with pytest.raises(WireError, match="longer than ten bytes"):
        fields(b"\x08" + b"\x80" * 10 + b"\x01")


@pytest.mark.parametrize("data", [b"\x08", b"\x08\x80", b"\x80", b"\x0a", b"\x0a\xff"])
def test_truncated_varint_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="ends inside a number"):
        fields(data)


@pytest.mark.parametrize(
    "data",
    [b"\x0a\x05abc", b"\x09\x00\x00", b"\x0d\x00", b"\x0a" + encode_varint((1 << 63) - 1) + b"x"],
)
def test_field_longer_than_the_message_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="has only"):
        fields(data)


@pytest.mark.parametrize(
    "data", [b"\x00\x01", b"\x02\x00", encode_varint(1 << 35 | VARINT) + b"\x01"]
)
def test_invalid_field_number_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="not a valid one"):
        fields(data)


@pytest.mark.parametrize("data", [b"\x0e", b"\x0f", b"\x0c", b"\x0b\x14"])
def test_invalid_wire_type_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="makes no sense"):
        fields(data)


def test_all_wire_types_are_read_in_any_order() -> None:
    writer = MessageWriter()
    writer.payload(make_tag(3, LEN), b"abc")
    writer.double(make_tag(2, FIXED64), 1.5)
    writer.number(make_tag(1, VARINT), 300)
    data = writer.to_bytes() + bytes([make_tag(4, FIXED32)]) + b"\x01\x02\x03\x04"
    decoded = fields(data)
    assert [field[0] for field in decoded] == [26, 17, 8, 37]
    assert decoded[0][2] == b"abc"
    assert to_double(memoryview(decoded[1][2])) == 1.5
    assert decoded[2][1] == 300
    assert decoded[3][2] == b"\x01\x02\x03\x04"


def test_groups_are_skipped() -> None:
    group = b"\x0b\x13\x08\x05\x14\x0a\x01x\x0c"  # group 1 { group 2 { 1: 5 } 1: "x" }
    values = read_singular(memoryview(group + b"\x10\x07"), {8: int, 10: bytes, 16: int})
    assert values == {16: 7}
    with pytest.raises(WireError, match="ends inside group 1"):
        fields(group[:-1])


def test_field_with_another_wire_type_is_unknown() -> None:
    readers = {make_tag(1, VARINT): to_int64}
    assert read_singular(memoryview(b"\x0a\x01x"), readers) == {}
    assert read_singular(memoryview(b"\x08\x05\x0a\x01x"), readers) == {8: 5}


def test_last_value_of_field_wins() -> None:
    assert read_singular(memoryview(b"\x08\x05\x08\x06"), {8: to_int64}) == {8: 6}


def test_last_value_of_oneof_wins_and_one_is_required() -> None:
    readers: Readers = {10: bytes, 18: to_text}
    assert read_oneof(memoryview(b"\x0a\x01a\x12\x01b\x0a\x01c"), readers, "it") == b"c"
    assert read_oneof(memoryview(b"\x0a\x01a\x12\x01b"), readers, "it") == "b"
    with pytest.raises(WireError, match="it is none"):
        read_oneof(memoryview(b"\x20\x01"), readers, "it")


def test_packed_and_unpacked_integers_are_read() -> None:
    assert read_integers(make_tag(4, LEN), 0, memoryview(encode_varint(3) + encode_varint(-1))) == [
        3,
        -1,
    ]
    assert read_integers(make_tag(4, LEN), 0, memoryview(b"")) == []
    assert read_integers(make_tag(4, VARINT), (1 << 64) - 5, memoryview(b"")) == [-5]


def test_numbers_are_truncated_to_their_type() -> None:
    assert to_int32((1 << 64) - 1) == -1
    assert to_int32((1 << 32) + 7) == 7
    assert to_uint32((1 << 64) - 1) == 0xFFFF_FFFF
    assert to_int64(1 << 63) == -(1 << 63)


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(WireError, match="not UTF-8"):
        to_text(memoryview(b"\xff"))


def test_default_values_are_omitted_unless_present() -> None:
    writer = MessageWriter()
    writer.number(8, 0)
    writer.payload(18, b"")
    writer.text(26, "")
    writer.packed(34, [])
    assert writer.to_bytes() == b""
    writer.number(8, 0, present=True)
    writer.payload(18, b"", present=True)
    assert writer.to_bytes() == b"\x08\x00\x12\x00"


def test_nested_messages_have_their_length() -> None:
    def write_inner(writer: MessageWriter, value: bytes) -> None:
        writer.payload(10, memoryview(value))

    def write_outer(writer: MessageWriter, value: bytes) -> None:
        writer.message(10, write_inner, value)
        writer.number(16, 1)

    writer = MessageWriter()
    writer.message(26, write_outer, b"x" * 200)
    data = writer.to_bytes()
    assert len(data) == writer.size
    assert data == b"\x1a\xd0\x01\x0a\xcb\x01\x0a\xc8\x01" + b"x" * 200 + b"\x10\x01"


def test_megabyte_of_tiny_fields_is_refused_quickly() -> None:
    started = time.perf_counter()
    for data in (b"\x80" * 1_000_000, b"\x0b" * 1_000_000, b"\x08" + b"\xff" * 1_000_000):
        with pytest.raises(WireError):
            fields(data)
    assert time.perf_counter() - started < 5
