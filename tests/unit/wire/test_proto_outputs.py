"""Protobuf codec of training results, including invalid messages."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from tinkex.types import ForwardBackwardOutput, TensorData
from tinkex.wire.proto import (
    WireError,
    decode_forward_backward_output,
    encode_forward_backward_output,
)
from tinkex.wire.proto.outputs import MAX_BARE_DATUMS
from tinkex.wire.proto.protobuf import encode_varint


def field(number: int, payload: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(payload)) + payload


def column(
    data: bytes, offsets: list[int], dtype: int = 1, trailing: list[int] | None = None
) -> bytes:
    packed = struct.pack(f"<{len(offsets)}q", *offsets)
    shape = b"".join(map(encode_varint, trailing or []))
    return field(1, data) + field(2, packed) + b"\x18" + encode_varint(dtype) + field(4, shape)


def record(num_datums: int, **columns: bytes) -> bytes:
    body = b"".join(field(2, field(1, k.encode()) + field(2, v)) for k, v in columns.items())
    return field(2, body + b"\x18" + encode_varint(num_datums))


def rows(data: bytes, name: str = "x") -> list[Any]:
    return [
        output[name].tolist() for output in decode_forward_backward_output(data).loss_fn_outputs
    ]


FLOATS = struct.pack("<6f", 0, 1, 2, 3, 4, 5)


def test_bytes_match_the_official_package() -> None:
    outputs = [{"logprobs": TensorData(values, "float32")} for values in ([1.0, 2.0], [3.0])]
    body = encode_forward_backward_output(ForwardBackwardOutput("Rec", outputs, {"loss:sum": 0.0}))
    assert body.hex() == (
        "0a03526563"
        "123f0a03526563"
        "12360a086c6f6770726f6273122a0a0c0000803f0000004000004040"
        "1218000000000000000008000000000000000c000000000000001801"
        "1802"
        "1a130a086c6f73733a73756d110000000000000000"
    )


def test_rows_are_split_at_the_offsets() -> None:
    assert rows(record(3, x=column(FLOATS, [0, 8, 8, 24]))) == [[0, 1], [], [2, 3, 4, 5]]


def test_rows_have_the_trailing_shape() -> None:
    shaped = record(2, x=column(FLOATS, [0, 8, 24], trailing=[1, 2]))
    assert rows(shaped) == [[[[0, 1]]], [[[2, 3]], [[4, 5]]]]
    empty = decode_forward_backward_output(record(1, x=column(b"", [0, 0], trailing=[0, 3])))
    assert empty.loss_fn_outputs[0]["x"].shape == [0, 0, 3]


def test_rows_share_writable_memory() -> None:
    output = decode_forward_backward_output(record(2, x=column(FLOATS, [0, 12, 24])))
    first, second = (datum["x"].to_numpy() for datum in output.loss_fn_outputs)
    assert np.shares_memory(first.base, second.base)
    assert first.flags.aligned
    second[0] = 9
    assert output.loss_fn_outputs[1]["x"].tolist() == [9, 4, 5]


@pytest.mark.parametrize(
    ("dtype", "data", "expected"),
    [
        (2, struct.pack("<2q", -1, 1 << 40), [[-1], [1 << 40]]),
        (3, struct.pack("<2i", -1, 7), [[-1], [7]]),
        (4, b"\x80\x3f\x00\xc0", [[1.0], [-2.0]]),
    ],
)
def test_every_dtype_is_read(dtype: int, data: bytes, expected: list[Any]) -> None:
    half = len(data) // 2
    body = record(2, x=column(data, [0, half, len(data)], dtype))
    assert rows(body) == expected
    output = decode_forward_backward_output(body).loss_fn_outputs[0]["x"]
    assert output.dtype == ("float32" if dtype == 4 else "int64")


def test_several_records_are_read() -> None:
    body = record(1, x=column(FLOATS, [0, 8])) + record(
        1, x=column(struct.pack("<2q", 1, 2), [0, 16], 2, [2])
    )
    assert rows(body) == [[0, 1], [[1, 2]]]


def test_datums_without_fields_are_counted() -> None:
    output = decode_forward_backward_output(record(2) + record(1))
    assert output.loss_fn_outputs == [{}, {}, {}]


def test_record_without_count_uses_its_columns() -> None:
    assert rows(record(0, x=column(FLOATS, [0, 8, 24]))) == [[0, 1], [2, 3, 4, 5]]


def test_count_is_authoritative() -> None:
    assert rows(record(1, x=column(FLOATS, [0, 8, 24]))) == [[0, 1]]


@pytest.mark.parametrize(
    ("sent", "read"), [("a.b:C", "C"), ("a:b:C", "C"), ("C", "C"), ("", "ArrayRecord")]
)
def test_module_of_output_type_is_removed(sent: str, read: str) -> None:
    output = decode_forward_backward_output(field(1, sent.encode()))
    assert output == ForwardBackwardOutput(read, [], {})


def test_last_metric_wins_in_any_order() -> None:
    def metric(name: bytes, value: float) -> bytes:
        return field(3, b"\x11" + struct.pack("<d", value) + field(1, name))

    body = metric(b"a", 1.0) + field(1, b"T") + metric(b"b", 2.0) + metric(b"a", 3.0)
    assert decode_forward_backward_output(body).metrics == {"a": 3.0, "b": 2.0}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (record(1, x=column(FLOATS, [0, 28])), "do not rise from 0 to 24"),
        (record(2, x=column(FLOATS, [0, 12, 8])), "do not rise"),
        (record(1, x=column(FLOATS, [-4, 8])), "do not rise"),
        (record(2, x=column(FLOATS, [0, (1 << 63) - 1, -(1 << 63)])), "do not rise"),
        (record(1, x=column(FLOATS, [0, 6])), "not multiples of 4"),
        (record(1, x=column(FLOATS, [0, 12], trailing=[2])), "not multiples of 8"),
        (record(1, x=column(FLOATS, [0, 24], trailing=[5])), "do not fill cells"),
        (record(1, x=column(FLOATS, [0, 24], trailing=[0])), "do not fill cells"),
        (record(1, x=column(FLOATS, [0, 24], trailing=[-1, -6])), "do not fill cells"),
        (record(1, x=column(b"", [0, 0], trailing=[(1 << 63) - 1] * 9)), "do not fill cells"),
        (record(1, x=column(b"", [0, 0], trailing=[1] * 65)), "65 dimensions"),
        (record(1, x=column(FLOATS[:-1], [0, 4])), "not a multiple of 4"),
        (record(1, x=column(FLOATS, [0, 24], 9)), "unknown dtype 9"),
        (record(1, x=column(FLOATS, [0, 24], 0)), "unknown dtype 0"),
        (record(1, x=field(2, b"abc") + b"\x18\x01"), "offsets has 3 bytes"),
        (record(3, x=column(FLOATS, [0, 8, 24])), "2 rows for 3 datums"),
        (record(1, x=column(b"", [])), "0 rows for 1 datums"),
        (record(-1), "claims -1 datums"),
        (record(1 << 60), "says nothing of them"),
        (record(MAX_BARE_DATUMS) + record(1), "says nothing of them"),
        (record(1 << 60, x=column(FLOATS, [0, 24])), "1 rows for"),
    ],
)
def test_invalid_result_is_refused(body: bytes, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        decode_forward_backward_output(body)


def test_consecutive_similar_datums_share_a_record() -> None:
    def datum(*shape: int, dtype: Any = np.float32) -> dict[str, TensorData]:
        return {"x": TensorData.from_numpy(np.ones(shape, dtype))}

    outputs = [datum(2), datum(5), datum(2, 3), datum(1, 3), datum(4), datum(4, dtype=np.int64)]
    body = encode_forward_backward_output(ForwardBackwardOutput("T", outputs))
    assert body.count(b"\x12\x01x") + body.count(b"\x0a\x01x") == 4
    assert decode_forward_backward_output(body).loss_fn_outputs == outputs


def test_field_order_does_not_split_records() -> None:
    a, b = TensorData([1.0], "float32"), TensorData([2], "int64")
    outputs = [{"a": a, "b": b}, {"b": b, "a": a}]
    body = encode_forward_backward_output(ForwardBackwardOutput("T", outputs))
    assert body.count(b"\x0a\x01a") == 1
    assert decode_forward_backward_output(body).loss_fn_outputs == outputs


def test_scalars_and_sparse_tensors_are_encoded_as_rows() -> None:
    scalar = {"x": TensorData([1.5], "float32", [])}
    sparse = {"x": TensorData([7], "int64", [2, 2], [0, 0, 1], [1])}
    body = encode_forward_backward_output(ForwardBackwardOutput("T", [scalar, sparse]))
    assert rows(body) == [[1.5], [[0, 0], [0, 7]]]
