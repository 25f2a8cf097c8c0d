"""Decoding of job payloads and conversion of exceptions to outcomes."""

from __future__ import annotations

import errno
import json

import pytest

from tinkex import types
from tinkex.engine.inference_request import InferenceParams, InferenceRequest
from tinkex.engine.protocol import StepRefused
from tinkex.errors import CheckpointError, InvalidInput, RequestErrorCategory
from tinkex.jobs.job_types import (
    decode_pass_payload,
    decode_payload,
    decode_sample_payload,
    encode_inference_payload,
    to_failed,
)
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import encode_forward_backward_request

INPUTS = types.ForwardBackwardInput(
    [types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})], "cross_entropy"
)
BACKWARD = types.ForwardBackwardRequest(INPUTS, "model", 1)
FORWARD = types.ForwardRequest(INPUTS, "model", 1)


@pytest.mark.parametrize(
    ("payload", "is_proto", "is_forward_only"),
    [
        (encode_forward_backward_request(BACKWARD), True, False),
        (encode_forward_backward_request(BACKWARD, forward_only=True), True, True),
        (encode_json(BACKWARD), False, False),
        (encode_json(BACKWARD), False, True),
        (encode_json(FORWARD), False, True),
        # SDKs up to 0.16.1 send chunks without a type.
        (encode_json(FORWARD).replace(b'"type":"encoded_text",', b""), False, True),
    ],
)
def test_pass_is_decoded_from_every_form(
    payload: bytes, is_proto: bool, is_forward_only: bool
) -> None:
    inputs = decode_pass_payload(payload, is_proto=is_proto, is_forward_only=is_forward_only)
    assert inputs == INPUTS


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"{", b'{"forward_input": 1}', encode_json(FORWARD)]
)
def test_invalid_pass_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidInput, match="the request cannot be decoded"):
        decode_pass_payload(payload, is_proto=False, is_forward_only=False)


SAMPLE = InferenceRequest(
    prompt=types.ModelInput.from_ints([1, 2]),
    sampling_params=InferenceParams(stop_texts=("x",), stop_token_ids=(7,), is_prompt_only=True),
)


def test_inference_request_is_decoded_from_its_payload() -> None:
    assert decode_sample_payload(encode_inference_payload(SAMPLE)) == SAMPLE


def test_clients_cannot_send_inference_fields() -> None:
    sample = decode_sample_payload(encode_json(SAMPLE))
    assert type(sample) is types.SampleRequest
    assert type(sample.sampling_params) is types.SamplingParams
    with pytest.raises(InvalidInput, match="the request cannot be decoded"):
        decode_payload(encode_inference_payload(SAMPLE), types.SampleRequest)


def test_invalid_payload_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the request cannot be decoded"):
        decode_payload(json.dumps({"model_id": 1}).encode(), types.SaveWeightsRequest)


@pytest.mark.parametrize(
    ("error", "category", "text"),
    [
        (InvalidInput("bad rank"), RequestErrorCategory.User, "bad rank"),
        (ValueError("bad value"), RequestErrorCategory.User, "bad value"),
        (CheckpointError("damaged"), RequestErrorCategory.Server, "damaged"),
        (OSError(errno.ENOSPC, "full"), RequestErrorCategory.Server, "No space left"),
        (OSError(errno.EIO, "broken"), RequestErrorCategory.Server, "broken"),
        (KeyError("x"), RequestErrorCategory.Server, "optim_step failed in the server: KeyError"),
    ],
)
def test_exceptions_become_failures(
    error: Exception, category: RequestErrorCategory, text: str
) -> None:
    failed = to_failed(error, "optim_step")
    assert failed.category == category
    assert text in failed.message
    assert not failed.is_model_change


def test_refused_step_changes_the_model() -> None:
    assert to_failed(StepRefused("not finite"), "optim_step").is_model_change
