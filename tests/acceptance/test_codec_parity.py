"""Compare encoded bytes with the official package, in both directions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tinker.types as official
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from tests.unit.wire.test_proto_roundtrip import OUTPUTS, REQUESTS, SAMPLES, SLOW_IS_FINE
from tinkex import types
from tinkex.errors import InvalidInput
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import (
    WireError,
    decode_forward_backward_output,
    decode_forward_backward_request,
    decode_sample_response,
    encode_forward_backward_output,
    encode_forward_backward_request,
    encode_sample_response,
)
from tinkex.wire.proto.protobuf import encode_varint, read_singular, to_uint32


# --- converting values to the official package's types --------------------------------------
def official_tensor(tensor: types.TensorData) -> official.TensorData:
    return official.TensorData(
        tensor.array,
        tensor.dtype,
        list(tensor.shape),
        tensor.sparse_crow_indices,
        tensor.sparse_col_indices,
    )


def official_spans(spans: Any) -> Any:
    if spans is None:
        return None
    return [
        getattr(official, type(span).__name__)(
            sequence_id=span.sequence_id, offset=span.offset, length=span.length
        )
        for span in spans
    ]


def official_chunk(chunk: types.ModelInputChunk) -> Any:
    fields = {name: getattr(chunk, name) for name in chunk.__struct_fields__}
    return getattr(official, type(chunk).__name__)(**fields)


def official_request(request: types.ForwardBackwardRequest) -> official.ForwardBackwardRequest:
    work = request.forward_backward_input
    data = [
        official.Datum(
            official.ModelInput(chunks=[official_chunk(c) for c in datum.model_input.chunks]),
            {name: official_tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()},
            official_spans(datum.model_input_spans),
            official_spans(datum.loss_fn_input_spans),
        )
        for datum in work.data
    ]
    return official.ForwardBackwardRequest(
        official.ForwardBackwardInput(data, work.loss_fn, work.loss_fn_config),
        request.model_id,
        request.seq_id,
    )


def same_tensor(ours: types.TensorData, theirs: official.TensorData) -> bool:
    return (
        (ours.dtype, ours.shape, ours.data) == (theirs.dtype, theirs.shape, theirs.data)
        and ours.sparse_crow_indices == theirs.sparse_crow_indices
        and ours.sparse_col_indices == theirs.sparse_col_indices
    )


def same_optional(ours: Any, theirs: Any) -> bool:
    return ours is theirs is None or same_tensor(ours, theirs)


def same_sample(ours: types.SampleResponse, theirs: official.SampleResponse) -> bool:
    alternatives = (ours.prompt_alt_tokens, theirs.prompt_alt_tokens)
    return (
        [(s.stop_reason, s.tokens, s.logprobs, s.topk_logprobs) for s in ours.sequences]
        == [(s.stop_reason, s.tokens, s.logprobs, s.topk_logprobs) for s in theirs.sequences]
        and ours.prompt_logprobs == theirs.prompt_logprobs
        and ours.topk_prompt_logprobs == theirs.topk_prompt_logprobs
        and ours.prompt_cache_hit_tokens == theirs.prompt_cache_hit_tokens
        and same_optional(ours.target_prompt_logprobs, theirs.target_prompt_logprobs)
        and all(
            same_optional(
                getattr(alternatives[0], name, None), getattr(alternatives[1], name, None)
            )
            for name in ("tokens", "logprobs")
        )
    )


def same_output(ours: types.ForwardBackwardOutput, theirs: official.ForwardBackwardOutput) -> bool:
    return (
        ours.loss_fn_output_type == theirs.loss_fn_output_type
        and ours.metrics == theirs.metrics
        and len(ours.loss_fn_outputs) == len(theirs.loss_fn_outputs)
        and all(
            mine.keys() == other.keys() and all(same_tensor(mine[n], other[n]) for n in mine)
            for mine, other in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True)
        )
    )


def is_in_order(request: types.ForwardBackwardRequest) -> bool:
    """True if no map has two entries, whose order protobuf does not guarantee."""
    work = request.forward_backward_input
    return len(work.loss_fn_config or {}) < 2 and all(len(d.loss_fn_inputs) < 2 for d in work.data)


# --- requests ------------------------------------------------------------------------------
@SLOW_IS_FINE
@given(REQUESTS)
def test_encoded_request_equals_official(request: types.ForwardBackwardRequest) -> None:
    ours = encode_forward_backward_request(request)
    theirs = forward_backward_request_to_proto(official_request(request))
    assert pb.ForwardBackwardRequest.FromString(ours) == theirs
    if is_in_order(request):
        assert ours == theirs.SerializeToString()


@SLOW_IS_FINE
@given(REQUESTS, st.booleans())
def test_official_request_is_decoded(
    request: types.ForwardBackwardRequest, forward_only: bool
) -> None:
    message = forward_backward_request_to_proto(official_request(request))
    message.forward_only = forward_only
    assert decode_forward_backward_request(message.SerializeToString()) == (request, forward_only)


def test_official_request_built_from_lists_and_tensors_is_decoded() -> None:
    torch = pytest.importorskip("torch")
    dense = torch.zeros(4, 50, dtype=torch.int64)
    dense[1, 7] = 3
    inputs: Any = {"target_tokens": dense, "weights": [1.0, 0.5, 0.0, 0.25]}
    datum = official.Datum(official.ModelInput.from_ints([1, 2, 3, 4]), inputs)
    asked = official.ForwardBackwardRequest(
        official.ForwardBackwardInput([datum], "cross_entropy", {"beta": 1}), "m", 7
    )
    body = forward_backward_request_to_proto(asked).SerializeToString()
    request, _ = decode_forward_backward_request(body)
    tensor = request.forward_backward_input.data[0].loss_fn_inputs["target_tokens"]
    assert tensor.is_sparse
    assert tensor.tolist() == dense.tolist()
    ours = types.Datum(types.ModelInput.from_ints([1, 2, 3, 4]), inputs)
    assert request.forward_backward_input.data == [ours]


# --- results -------------------------------------------------------------------------------
@SLOW_IS_FINE
@given(OUTPUTS)
def test_official_package_decodes_output(output: types.ForwardBackwardOutput) -> None:
    # The official decoder expects the same names in all records.
    names = output.loss_fn_outputs[0].keys() if output.loss_fn_outputs else set()
    like = [datum for datum in output.loss_fn_outputs if datum.keys() == names]
    same = types.ForwardBackwardOutput(output.loss_fn_output_type, like, output.metrics)
    body = encode_forward_backward_output(same)
    assert same_output(same, deserialize_forward_backward_output(body))
    assert same_output(
        decode_forward_backward_output(body), deserialize_forward_backward_output(body)
    )


def test_output_is_decoded_like_official_package() -> None:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="some.module:Record")
    message.metrics["loss:sum"] = 1.25
    numbers = np.array([0.5, -1, 2, 3, 0.25, 7], np.float32)
    halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    cases: list[tuple[Any, Any, list[int]]] = [
        (pb.DTYPE_FLOAT32, numbers, [0, 2, 6]),
        (pb.DTYPE_BFLOAT16, halves, [0, 0, 6]),
        (pb.DTYPE_INT32, np.arange(6, dtype=np.int32), [0, 4, 6]),
        (pb.DTYPE_INT64, np.arange(6, dtype=np.int64), [0, 6, 6]),
    ]
    for dtype, array, bounds in cases:
        for trailing in ([], [2]):
            record = message.loss_fn_outputs.add(num_datums=2)
            column = record.fields["x"]
            column.data = array.tobytes()
            column.offsets = (np.array(bounds, np.int64) * array.itemsize).tobytes()
            column.dtype = dtype
            column.trailing_shape.extend(trailing)
    body = message.SerializeToString()
    ours = decode_forward_backward_output(body)
    assert len(ours.loss_fn_outputs) == 16
    assert same_output(ours, deserialize_forward_backward_output(body))


@SLOW_IS_FINE
@given(SAMPLES)
def test_official_package_decodes_sample(response: types.SampleResponse) -> None:
    body = encode_sample_response(response)
    theirs = deserialize_sample_response(body)
    assert same_sample(response, theirs)
    assert same_sample(decode_sample_response(body), theirs)
    assert pb.SampleResponse.FromString(body).SerializeToString() == body


def test_bfloat16_tensor_is_decoded_unlike_official_package() -> None:
    message = pb.SampleResponse()
    message.target_prompt_logprobs.dense = b"\x80\x3f"
    message.target_prompt_logprobs.dtype = pb.DTYPE_BFLOAT16
    message.target_prompt_logprobs.shape.append(1)
    tensor = decode_sample_response(message.SerializeToString()).target_prompt_logprobs
    assert tensor is not None
    assert tensor.tolist() == [1.0]


# --- the wire format itself ----------------------------------------------------------------
READERS = {8: to_uint32, 16: to_uint32}  # ImageDimensions: width and height
NUMBERS = st.sampled_from([0, 1, 127, 128, 1 << 31, (1 << 32) + 5, (1 << 64) - 1])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Generate known and unknown, valid and invalid fields in any order, sometimes corrupted."""
    data = b""
    for _ in range(draw(st.integers(0, 5))):
        number, wire_type = draw(st.integers(0, 40)), draw(st.integers(0, 7))
        data += encode_varint(number << 3 | wire_type)
        if wire_type == 0:
            spare = draw(st.integers(0, 2))
            number_bytes = bytearray(encode_varint(draw(NUMBERS)))
            if len(number_bytes) + spare <= 10 and spare:
                number_bytes[-1] |= 0x80
                number_bytes += b"\x80" * (spare - 1) + b"\x00"
            data += bytes(number_bytes)
        elif wire_type == 2:
            payload = draw(st.binary(max_size=5))
            data += encode_varint(len(payload)) + payload
        elif wire_type in (1, 5):
            data += bytes(8 if wire_type == 1 else 4)
        elif wire_type == 3 and draw(st.booleans()):
            data += encode_varint(8) + b"\x05" + encode_varint(number << 3 | 4)
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


@SLOW_IS_FINE
@given(st.lists(streams(), min_size=20, max_size=20))
def test_streams_are_accepted_and_rejected_alike(many: list[bytes]) -> None:
    for data in many:
        try:
            theirs = pb.ImageDimensions.FromString(data)
        except DecodeError:
            with pytest.raises(WireError):
                read_singular(memoryview(data), READERS)
            continue
        ours = read_singular(memoryview(data), READERS)
        assert (ours.get(8, 0), ours.get(16, 0)) == (theirs.width, theirs.height)


@SLOW_IS_FINE
@given(REQUESTS, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3))
def test_damaged_requests_are_decoded_alike_or_rejected(
    request: types.ForwardBackwardRequest, damages: list[tuple[int, int]]
) -> None:
    body = bytearray(encode_forward_backward_request(request))
    for place, byte in damages:
        if place < len(body):
            body[place] = byte
    try:
        ours, forward_only = decode_forward_backward_request(bytes(body))
    except (WireError, InvalidInput):
        return
    theirs = pb.ForwardBackwardRequest.FromString(bytes(body))
    assert (ours.model_id, ours.seq_id, forward_only) == (
        theirs.model_id,
        theirs.seq_id,
        theirs.forward_only,
    )
    assert len(ours.forward_backward_input.data) == len(theirs.data)


# --- JSON ----------------------------------------------------------------------------------
@pytest.mark.parametrize("stop", [None, "a", ["a", "b"], [1, 2], []])
@pytest.mark.parametrize("extra", [{}, {"seed": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.25}])
def test_sample_request_equals_official(stop: Any, extra: dict[str, Any]) -> None:
    def make_request(package: Any, tensor: Any) -> Any:
        return package.SampleRequest(
            num_samples=2,
            prompt=package.ModelInput(
                chunks=[
                    package.EncodedTextChunk(tokens=[1, 2, 3]),
                    package.ImageChunk(data=b"\x00\x01", format="png", expected_tokens=5),
                    package.ImageAssetPointerChunk(format="jpeg", location="x"),
                    package.DmelChunk(dmel=b"abc"),
                ]
            ),
            sampling_params=package.SamplingParams(max_tokens=4, stop=stop, **extra),
            sampling_session_id="s:sample:0",
            seq_id=5_000_000_000,
            prompt_logprobs=True,
            target_prompt_logprobs=tensor,
        )

    wire = {"data": [1, -1], "dtype": "int64", "shape": [2, 1]}
    ours = make_request(types, types.TensorData([1, -1], "int64", [2, 1]))
    theirs = make_request(official, wire).model_dump(mode="json", exclude_none=True)
    assert json.loads(encode_json(ours)) == theirs
