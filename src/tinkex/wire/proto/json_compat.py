"""The JSON form of the protobuf messages, for older clients and servers.

Missing or null fields are accepted, present ones are validated: msgspec.ValidationError, or
InvalidInput for values that do not fit together. Provenance spans are newer than this form and are
not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar, cast

import msgspec

from tinkex.types.base import decode_hook, preload_type
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.sampling import (
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    StopReason,
    TopkLogprobs,
)
from tinkex.types.tensors import TensorData
from tinkex.types.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    LossFnType,
)
from tinkex.wire.proto.outputs import DEFAULT_OUTPUT_TYPE
from tinkex.wire.proto.sampling import topk_from_rows

if TYPE_CHECKING:
    from tinkex.types.arrays import Array

T = TypeVar("T")
Int32: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Floats: TypeAlias = list[float | None]
TopkRows: TypeAlias = list[list[tuple[Int32, float]] | None]

#: The encoded fields of values that are not structs.
JSON_FIELDS: dict[type, tuple[str, ...]] = {
    Datum: ("model_input", "loss_fn_inputs"),
    ForwardBackwardInput: ("data", "loss_fn", "loss_fn_config"),
    ForwardBackwardRequest: ("forward_backward_input", "model_id", "seq_id"),
    ForwardRequest: ("forward_input", "model_id", "seq_id"),
    ForwardBackwardOutput: ("loss_fn_output_type", "loss_fn_outputs", "metrics"),
    SampledSequence: ("stop_reason", "tokens", "logprobs", "topk_logprobs"),
    SampleResponse: (
        "sequences",
        "prompt_logprobs",
        "topk_prompt_logprobs",
        "target_prompt_logprobs",
        "prompt_cache_hit_tokens",
        "prompt_alt_tokens",
    ),
    PromptAltTokens: ("tokens", "logprobs"),
}


class _JsonDatum(msgspec.Struct):
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


class _JsonForwardBackwardInput(msgspec.Struct):
    data: list[_JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class _JsonForwardBackwardRequest(msgspec.Struct):
    forward_backward_input: _JsonForwardBackwardInput
    model_id: str
    seq_id: int | None = None


class _JsonForwardRequest(msgspec.Struct):
    forward_input: _JsonForwardBackwardInput
    model_id: str
    seq_id: int | None = None


class _JsonForwardBackwardOutput(msgspec.Struct):
    loss_fn_output_type: str | None = None
    loss_fn_outputs: list[dict[str, TensorData | None]] | None = None
    metrics: dict[str, float | None] | None = None


class _JsonSampledSequence(msgspec.Struct):
    stop_reason: StopReason | None = None
    tokens: list[Int32] | None = None
    logprobs: Floats | None = None
    topk_logprobs: TopkRows | None = None


class _JsonPromptAltTokens(msgspec.Struct):
    tokens: TensorData
    logprobs: TensorData


class _JsonSampleResponse(msgspec.Struct):
    sequences: list[_JsonSampledSequence]
    prompt_logprobs: Floats | None = None
    topk_prompt_logprobs: TopkRows | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int | None = None
    prompt_alt_tokens: _JsonPromptAltTokens | None = None


def forward_backward_request_from_json(obj: object) -> ForwardBackwardRequest:
    """Decode the JSON request of older clients to forward_backward."""
    body = _convert(obj, _JsonForwardBackwardRequest)
    inputs = _read_input(body.forward_backward_input)
    return ForwardBackwardRequest(inputs, body.model_id, body.seq_id)


def forward_request_from_json(obj: object) -> ForwardRequest:
    """Decode the JSON request of older clients to forward."""
    body = _convert(obj, _JsonForwardRequest)
    return ForwardRequest(_read_input(body.forward_input), body.model_id, body.seq_id)


def forward_backward_output_from_json(obj: object) -> ForwardBackwardOutput:
    """Decode the JSON result of forward and forward_backward from older servers."""
    body = _convert(obj, _JsonForwardBackwardOutput)
    outputs = [
        {name: tensor for name, tensor in output.items() if tensor is not None}
        for output in body.loss_fn_outputs or ()
    ]
    # JSON has no NaN; such a loss arrives as null.
    metrics = {
        name: float("nan") if value is None else value
        for name, value in (body.metrics or {}).items()
    }
    output_type = (body.loss_fn_output_type or "").rpartition(":")[2]
    return ForwardBackwardOutput(output_type or DEFAULT_OUTPUT_TYPE, outputs, metrics)


def sample_response_from_json(obj: object) -> SampleResponse:
    """Decode the JSON result of a sample from older servers."""
    body = _convert(obj, _JsonSampleResponse)
    alternatives = body.prompt_alt_tokens
    return SampleResponse(
        sequences=[_read_sequence(sequence) for sequence in body.sequences],
        prompt_logprobs_np=_float_array(body.prompt_logprobs),
        topk_prompt_logprobs_np=_topk_arrays(body.topk_prompt_logprobs),
        target_prompt_logprobs=body.target_prompt_logprobs,
        prompt_cache_hit_tokens=body.prompt_cache_hit_tokens or 0,
        prompt_alt_tokens=None
        if alternatives is None
        else PromptAltTokens(alternatives.tokens, alternatives.logprobs),
    )


def _convert(obj: object, type_: type[T]) -> T:
    return msgspec.convert(obj, preload_type(type_), dec_hook=decode_hook)


def _read_input(inputs: _JsonForwardBackwardInput) -> ForwardBackwardInput:
    datums = [Datum(datum.model_input, datum.loss_fn_inputs) for datum in inputs.data]
    # The server, not the codec, decides which losses exist.
    return ForwardBackwardInput(datums, cast(LossFnType, inputs.loss_fn), inputs.loss_fn_config)


def _read_sequence(sequence: _JsonSampledSequence) -> SampledSequence:
    # As in protobuf: a missing reason means "stop", and the id is part of the future.
    return SampledSequence(
        stop_reason=sequence.stop_reason or "stop",
        sequence_id="",
        tokens_np=_array(sequence.tokens or (), "int32"),
        logprobs_np=_float_array(sequence.logprobs),
        topk_logprobs_np=_topk_arrays(sequence.topk_logprobs),
    )


def _float_array(numbers: Floats | None) -> Array | None:
    # NumPy converts None to NaN.
    return _array(numbers, "float32") if numbers else None


def _array(numbers: Sequence[float | None], dtype: str) -> Array:
    import numpy as np

    return np.array(numbers, dtype)


def _topk_arrays(rows: TopkRows | None) -> TopkLogprobs | None:
    return topk_from_rows(rows) if rows and any(rows) else None
