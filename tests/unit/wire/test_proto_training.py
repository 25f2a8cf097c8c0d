"""Protobuf codec of training requests: exact bytes and invalid messages."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from tinkex.errors import InvalidInput
from tinkex.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ImageAssetPointerChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)
from tinkex.wire.proto import (
    WireError,
    decode_forward_backward_request,
    encode_forward_backward_request,
)
from tinkex.wire.proto.protobuf import encode_varint


def ask(
    *data: Datum, config: Any = None, seq_id: Any = 1, loss: Any = "ppo", model: Any = "m"
) -> ForwardBackwardRequest:
    return ForwardBackwardRequest(ForwardBackwardInput(list(data), loss, config), model, seq_id)


def field(number: int, payload: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(payload)) + payload


def decode_datum(payload: bytes) -> Datum:
    request, _ = decode_forward_backward_request(field(3, payload))
    return request.forward_backward_input.data[0]


def decode_tensor(payload: bytes) -> TensorData:
    entry = field(1, b"weights") + field(2, payload)
    return decode_datum(field(2, entry)).loss_fn_inputs["weights"]


def test_bytes_match_the_official_package() -> None:
    datum = Datum(ModelInput.from_ints([1, 70000]), {"weights": [0.5, 1.0]})
    body = encode_forward_backward_request(ask(datum, config={"clip": 2}, seq_id=300), True)
    assert body.hex() == (
        "0a016d10ac02"
        "1a2a0a0c0a0a0a080100000070110100"
        "121a0a0777656967687473120f0a080000003f0000803f1801220102"
        "220370706f"
        "2a0f0a04636c6970110000000000000040"
        "3001"
        "3a110a04636c69701209090000000000000040"
    )


def test_defaults_are_omitted() -> None:
    assert encode_forward_backward_request(ask(model="", loss="", seq_id=None)) == b""
    request, forward_only = decode_forward_backward_request(b"")
    assert request == ask(model="", loss="", seq_id=0)
    assert forward_only is False


def test_config_numbers_are_in_both_maps_and_texts_in_the_newer_one() -> None:
    config = {"flag": True, "beta": np.float32(0.5), "loss_id": "abc", "count": 3}
    body = encode_forward_backward_request(ask(config=config))
    request, _ = decode_forward_backward_request(body)
    expected = {"flag": 1.0, "beta": 0.5, "loss_id": "abc", "count": 3.0}
    assert request.forward_backward_input.loss_fn_config == expected
    assert body.count(b"beta") == 2
    assert body.count(b"loss_id") == 1


def test_legacy_config_is_used_without_the_newer_one() -> None:
    entry = field(1, b"beta") + b"\x11" + struct.pack("<d", 0.25)
    request, _ = decode_forward_backward_request(field(5, entry) + field(5, field(1, b"zero")))
    assert request.forward_backward_input.loss_fn_config == {"beta": 0.25, "zero": 0.0}


@pytest.mark.parametrize("value", [None, [1.0], object(), 1 << 2000])
def test_invalid_config_value_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"loss_fn_config\['beta'\]"):
        encode_forward_backward_request(ask(config={"beta": value}))


@pytest.mark.parametrize("seq_id", [1 << 31, -(1 << 31) - 1, "1", 1.5])
def test_seq_id_must_be_int32(seq_id: Any) -> None:
    with pytest.raises(InvalidInput, match="seq_id is"):
        encode_forward_backward_request(ask(seq_id=seq_id))


@pytest.mark.parametrize(("loss", "model"), [(7, "m"), ("ppo", None)])
def test_names_must_be_text(loss: Any, model: Any) -> None:
    with pytest.raises(InvalidInput, match="expected a text"):
        encode_forward_backward_request(ask(loss=loss, model=model))


def test_token_must_be_int32() -> None:
    model_input = ModelInput.from_ints([1])
    model_input.chunks[0].tokens.append(1 << 31)  # type: ignore[union-attr]
    with pytest.raises(InvalidInput, match="token is 2147483648"):
        encode_forward_backward_request(ask(Datum(model_input)))


def test_image_pointer_is_refused() -> None:
    chunk = ImageAssetPointerChunk(format="png", location="s3://x")
    datum = Datum(ModelInput(chunks=[chunk]))
    with pytest.raises(InvalidInput, match="does not accept ImageAssetPointerChunk"):
        encode_forward_backward_request(ask(datum))


def test_tensor_memory_is_written_in_row_order() -> None:
    turned = np.arange(6, dtype=np.int64).reshape(2, 3).T
    body = encode_forward_backward_request(
        ask(Datum(ModelInput.from_ints([1]), {"t": TensorData.from_numpy(turned)}))
    )
    request, _ = decode_forward_backward_request(body)
    tensor = request.forward_backward_input.data[0].loss_fn_inputs["t"]
    assert tensor.tolist() == turned.tolist()


def test_numpy_integers_are_accepted() -> None:
    three: Any = np.int64(3)
    span = PromptProvenanceSpan(sequence_id="p", offset=three, length=three)
    datum = Datum(ModelInput.from_ints([1]), {}, [span], [span])
    request, _ = decode_forward_backward_request(encode_forward_backward_request(ask(datum)))
    assert request.forward_backward_input.data[0].model_input_spans == [span]


def test_missing_list_of_spans_becomes_empty() -> None:
    run = field(1, b"s") + b"\x18\x04"
    datum = decode_datum(field(3, field(2, run)))
    assert datum.model_input_spans == [SampledProvenanceSpan(sequence_id="s", length=4)]
    assert datum.loss_fn_input_spans == []


def test_decoded_tensors_are_writable() -> None:
    tensor = decode_tensor(field(1, struct.pack("<2f", 1, 2)) + b"\x18\x01\x22\x01\x02")
    tensor.array[0] = 5
    assert tensor.array.flags.aligned
    assert tensor.tolist() == [5, 2]


def test_packed_and_unpacked_shapes_are_read() -> None:
    dense = field(1, struct.pack("<4f", 1, 2, 3, 4)) + b"\x18\x01"
    assert decode_tensor(dense + field(4, b"\x02\x02")).shape == [2, 2]
    assert decode_tensor(dense + b"\x20\x02\x20\x02").shape == [2, 2]
    assert decode_tensor(dense).shape == [4]
    assert decode_tensor(field(1, struct.pack("<f", 1)) + b"\x18\x01").shape == []


def test_small_types_are_widened() -> None:
    int32 = decode_tensor(field(1, struct.pack("<2i", -1, 7)) + b"\x18\x03\x22\x01\x02")
    assert (int32.dtype, int32.tolist()) == ("int64", [-1, 7])
    bfloat16 = decode_tensor(field(1, b"\x80\x3f\x00\xc0") + b"\x18\x04\x22\x01\x02")
    assert (bfloat16.dtype, bfloat16.tolist()) == ("float32", [1.0, -2.0])


CSR = field(1, struct.pack("<2f", 1, 2)) + field(3, struct.pack("<2q", 0, 3))


def test_sparse_tensor_stays_sparse() -> None:
    csr = CSR + field(2, struct.pack("<3q", 0, 1, 2))
    tensor = decode_tensor(field(2, csr) + b"\x18\x01" + field(4, b"\x02\x04"))
    assert tensor.sparse_crow_indices == [0, 1, 2]
    assert tensor.sparse_col_indices == [0, 3]
    assert tensor.tolist() == [[1, 0, 0, 0], [0, 0, 0, 2]]


@pytest.mark.parametrize(
    "payload",
    [
        field(1, b"abc") + b"\x18\x01",  # not whole floats
        field(1, b"abcd"),  # no dtype
        field(1, b"abcd") + b"\x18\x09",  # unknown dtype
        field(1, b"abcd") + b"\x18\x01\x22\x01\x02",  # shape too large
        field(1, b"abcd") + b"\x18\x01" + field(4, encode_varint(-1) * 2),  # negative shape
        field(1, b"") + b"\x18\x01" + field(4, b"\x00" + encode_varint((1 << 63) - 1)),  # absurd
        field(1, b"abcd") + b"\x18\x01" + field(4, b"\x01" * 65),  # too many dimensions
        field(2, CSR) + b"\x18\x01" + field(4, b"\x02\x04"),  # no row pointers
        field(2, CSR + field(2, struct.pack("<3q", 0, 2, 1))) + b"\x18\x01" + field(4, b"\x02\x04"),
        field(2, CSR + field(2, struct.pack("<3q", 0, 1, 2))) + b"\x18\x01" + field(4, b"\x02\x03"),
        field(2, CSR + field(2, struct.pack("<3q", 0, 1, 2))) + b"\x18\x01" + field(4, b"\x02"),
    ],
)
def test_invalid_tensor_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match=r"loss_fn_inputs\['weights'\]"):
        decode_tensor(payload)


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (field(1, b""), "a chunk is none"),
        (field(1, field(1, field(1, b"abc"))), "3 bytes, not a multiple of 4"),
        (field(3, b""), "a provenance span is none"),
        (field(2, field(1, b"\xff")), "not UTF-8"),
    ],
)
def test_invalid_datum_is_refused(payload: bytes, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        decode_datum(payload)


@pytest.mark.parametrize(
    "payload",
    [
        field(1, field(1, field(1, struct.pack("<i", -5)))),  # negative token
        field(1, field(2, field(1, b"x") + field(2, b"gif"))),  # unknown image format
        field(3, field(1, b"\x18\x01")),  # span without a sequence
        field(
            2, field(1, b"w") + field(2, field(1, struct.pack("<f", float("nan"))) + b"\x18\x01")
        ),
    ],
)
def test_values_refused_by_constructors_are_refused_when_decoding(payload: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode_datum(payload)


def test_unknown_fields_are_skipped() -> None:
    datum = field(99, b"new") + field(1, field(1, field(9, b"?") + field(1, struct.pack("<i", 7))))
    assert decode_datum(datum).model_input.to_ints() == [7]


def test_too_many_parts_are_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_datum = b"\x1a\x00"
    with pytest.raises(WireError, match="more than 65536 fields"):
        decode_forward_backward_request(empty_datum * 100_000)
    monkeypatch.setattr("tinkex.wire.proto.training.MAX_PARTS", 1000)
    datum = b"\x0a\x02\x0a\x00" * 300
    crowded = (b"\x1a" + encode_varint(len(datum)) + datum) * 5
    with pytest.raises(WireError, match="more than 1000 parts"):
        decode_forward_backward_request(crowded)
