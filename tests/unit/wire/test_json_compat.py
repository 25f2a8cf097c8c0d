"""The JSON form of protobuf messages, for older clients and servers."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given

from tests.unit.wire.test_proto_roundtrip import SLOW_IS_FINE, datums
from tinkex.errors import InvalidInput
from tinkex.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    ModelInput,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    TensorData,
)
from tinkex.wire.codec import (
    decode_json,
    encode_json,
    forward_backward_output_from_json,
    forward_backward_request_from_json,
    forward_request_from_json,
    sample_response_from_json,
)

WORK: dict[str, Any] = {
    "data": [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "loss_fn_inputs": {
                "weights": {"data": [0.5, 1.0], "dtype": "float32", "shape": [2]},
                "target_tokens": {"data": [2, 3], "dtype": "int64"},
            },
        }
    ],
    "loss_fn": "cross_entropy",
    "loss_fn_config": {"beta": 0.5, "name": "x"},
}
INPUT = ForwardBackwardInput(
    [Datum(ModelInput.from_ints([1, 2]), {"weights": [0.5, 1.0], "target_tokens": [2, 3]})],
    "cross_entropy",
    {"beta": 0.5, "name": "x"},
)


def test_forward_backward_request_is_read() -> None:
    wire = {
        "forward_backward_input": WORK,
        "model_id": "m",
        "seq_id": 4,
        "type": "forward_backward",
    }
    assert forward_backward_request_from_json(wire) == ForwardBackwardRequest(INPUT, "m", 4)


def test_forward_request_is_read() -> None:
    wire = {"forward_input": WORK, "model_id": "m", "seq_id": None}
    assert forward_request_from_json(wire) == ForwardRequest(INPUT, "m")


def test_requests_round_trip_through_json() -> None:
    for request in (ForwardBackwardRequest(INPUT, "m", 4), ForwardRequest(INPUT, "m")):
        assert decode_json(encode_json(request), type(request)) == request
    assert b"null" not in encode_json(ForwardRequest(INPUT, "m"))


@SLOW_IS_FINE
@given(datums())
def test_datums_round_trip_through_json_without_spans(datum: Datum) -> None:
    request = ForwardBackwardRequest(ForwardBackwardInput([datum], "ppo"), "m")
    plain = Datum(datum.model_input, datum.loss_fn_inputs)
    expected = ForwardBackwardRequest(ForwardBackwardInput([plain], "ppo"), "m")
    assert decode_json(encode_json(request), ForwardBackwardRequest) == expected


@pytest.mark.parametrize("wire", [{}, {"forward_backward_input": {}, "model_id": "m"}, [], None])
def test_request_with_missing_fields_is_refused(wire: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        forward_backward_request_from_json(wire)


def test_request_with_nan_is_refused() -> None:
    tensor = {"data": [None], "dtype": "float32", "shape": [1]}
    datum = {"model_input": {"chunks": []}, "loss_fn_inputs": {"weights": tensor}}
    wire = {"forward_backward_input": {"data": [datum], "loss_fn": "ppo"}, "model_id": "m"}
    with pytest.raises(InvalidInput, match=r"weights\[0\] is nan"):
        forward_backward_request_from_json(wire)


def test_output_is_read() -> None:
    wire = {
        "loss_fn_output_type": "TorchLossReturn",
        "loss_fn_outputs": [
            {"logprobs": {"data": [-1, -2.5], "dtype": "float32", "shape": [2]}, "extra": None}
        ],
        "metrics": {"loss:sum": 3, "grad:max": None},
        "type": "forward_backward",
    }
    output = forward_backward_output_from_json(wire)
    assert output.loss_fn_output_type == "TorchLossReturn"
    assert output.loss_fn_outputs == [{"logprobs": TensorData([-1.0, -2.5], "float32")}]
    assert output.metrics["loss:sum"] == 3.0
    assert math.isnan(output.metrics["grad:max"])


def test_output_without_fields_is_empty() -> None:
    empty = ForwardBackwardOutput("ArrayRecord", [], {})
    nulls = {"loss_fn_output_type": None, "loss_fn_outputs": None, "metrics": None}
    assert forward_backward_output_from_json({}) == empty
    assert forward_backward_output_from_json(nulls) == empty


def test_output_round_trips_through_json() -> None:
    tensor = TensorData([1.0, 2.0], "float32", [1, 2])
    output = ForwardBackwardOutput("T", [{"logprobs": tensor}, {}], {"loss:sum": 1.5})
    assert decode_json(encode_json(output), ForwardBackwardOutput) == output


def test_sample_is_read() -> None:
    wire = {
        "sequences": [
            {"stop_reason": "length", "tokens": [1, 2], "logprobs": [-0.5, -1]},
            {"tokens": None, "logprobs": None, "topk_logprobs": [None, [[5, -0.5]]]},
        ],
        "prompt_logprobs": [None, -2.0],
        "topk_prompt_logprobs": [None, [[7, -0.25], [8, -1]]],
        "target_prompt_logprobs": {"data": [0.5], "dtype": "float32", "shape": [1, 1]},
        "prompt_alt_tokens": {
            "tokens": {"data": [4], "dtype": "int64", "shape": [1, 1]},
            "logprobs": {"data": [-1], "dtype": "float32", "shape": [1, 1]},
        },
        "prompt_cache_hit_tokens": None,
        "type": "sample",
    }
    response = sample_response_from_json(wire)
    first, second = response.sequences
    assert (first.stop_reason, first.tokens, first.logprobs) == ("length", [1, 2], [-0.5, -1.0])
    assert first.tokens_np is not None
    assert str(first.tokens_np.dtype) == "int32"
    assert (second.stop_reason, second.tokens, second.logprobs) == ("stop", [], None)
    assert second.topk_logprobs == [None, [(5, -0.5)]]
    assert response.prompt_logprobs == [None, -2.0]
    assert response.topk_prompt_logprobs == [None, [(7, -0.25), (8, -1.0)]]
    assert response.target_prompt_logprobs == TensorData([0.5], "float32", [1, 1])
    assert response.prompt_alt_tokens is not None
    assert response.prompt_alt_tokens.tokens.tolist() == [[4]]
    assert response.prompt_cache_hit_tokens == 0


def test_sample_round_trips_through_json() -> None:
    response = SampleResponse(
        [SampledSequence("stop", "", _tokens_list=[1], _logprobs_list=[-0.5])],
        prompt_cache_hit_tokens=2,
        _prompt_logprobs_list=[None, -1.0],
    )
    body = encode_json(response)
    assert b"np" not in body
    assert decode_json(body, SampleResponse) == response


@pytest.mark.parametrize(
    "wire",
    [
        {},
        {"sequences": None},
        {"sequences": [{"tokens": [1 << 40]}]},
        {"sequences": [{"stop_reason": "bored"}]},
        {"sequences": [], "target_prompt_logprobs": {"data": [1], "dtype": "int8"}},
    ],
)
def test_invalid_sample_is_refused(wire: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        sample_response_from_json(wire)


# --- SDKs up to 0.16.1: chunks without a type ------------------------------------------------
#: What tinker 0.12.0 posts to asample and forward_backward.
SAMPLE_0_12 = b"""{"num_samples": 1, "prompt": {"chunks": [{"tokens": [1, 2]},
    {"data": "AP8=", "format": "png", "expected_tokens": 3}, {"location": "s3://x", "format":
    "jpeg"}]}, "prompt_logprobs": false, "sampling_params": {"max_tokens": 5, "seed": 1,
    "temperature": 1.0, "top_k": -1, "top_p": 1.0}, "sampling_session_id": "s:sample:0",
    "seq_id": 0, "topk_prompt_logprobs": 0, "type": "sample"}"""
PASS_0_12 = b"""{"forward_backward_input": {"data": [{"loss_fn_inputs": {"target_tokens":
    {"data": [2, 3], "dtype": "int64", "shape": [2]}, "weights": {"data": [0.5, 1.0], "dtype":
    "float32", "shape": [2]}}, "model_input": {"chunks": [{"tokens": [1, 2]}]}}], "loss_fn":
    "cross_entropy", "loss_fn_config": {"beta": 0.5, "name": "x"}}, "model_id": "m", "seq_id":
    4}"""


def test_chunk_type_is_inferred() -> None:
    request = decode_json(SAMPLE_0_12, SampleRequest)
    kinds = [chunk.type for chunk in request.prompt.chunks]
    assert kinds == ["encoded_text", "image", "image_asset_pointer"]
    assert decode_json(PASS_0_12, ForwardBackwardRequest).forward_backward_input == INPUT
    forward = PASS_0_12.replace(b"forward_backward_input", b"forward_input")
    assert decode_json(forward, ForwardRequest).forward_input == INPUT


def test_legacy_image_chunk_with_token_count_is_read() -> None:
    image = b'{"data": "AP8=", "format": "png", "height": 2, "width": 2, "tokens": 3}'
    body = SAMPLE_0_12.replace(b'{"tokens": [1, 2]}', image)
    assert decode_json(body, SampleRequest).prompt.chunks[0].type == "image"


def test_existing_chunk_type_is_kept() -> None:
    mixed = SAMPLE_0_12.replace(b'{"tokens"', b'{"location": "x", "type": "encoded_text", "tokens"')
    assert decode_json(mixed, SampleRequest).prompt.chunks[0].type == "encoded_text"


@pytest.mark.parametrize(
    ("chunk", "sentence"),
    [
        (b'{"tokens": [1], "data": "AP8="}', "a chunk without a type has tokens and data"),
        (b'{"format": "png"}', "has none of tokens, data, location; set its type"),
    ],
)
def test_ambiguous_chunk_is_refused(chunk: bytes, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        decode_json(SAMPLE_0_12.replace(b'{"tokens": [1, 2]}', chunk), SampleRequest)


@pytest.mark.parametrize("wrong", [b"5", b'{"tokens": ["x"]}', b'{"tokens": 7}', b"[[]]"])
def test_other_invalid_chunks_are_refused(wrong: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_json(SAMPLE_0_12.replace(b'{"tokens": [1, 2]}', wrong), SampleRequest)


def test_current_body_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkex.wire.codec.add_chunk_types", None)
    body = SAMPLE_0_12.replace(b'{"tokens"', b'{"type": "encoded_text", "tokens"')
    body = body.replace(b'{"data"', b'{"type": "image", "data"')
    body = body.replace(b'{"location"', b'{"type": "image_asset_pointer", "location"')
    assert len(decode_json(body, SampleRequest).prompt.chunks) == 3
