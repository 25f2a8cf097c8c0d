"""JSON schemas of all messages, for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import msgspec

from tinkex import types
from tinkex.types.open_types import OpenRecord
from tinkex.types.optimizers import (
    AdamOptimizerConfig,
    DimuonOptimizerConfig,
    DimuonParams,
)

REF_PREFIX = "#/components/schemas/"
_INTEGERS = {"type": "array", "items": {"type": "integer"}}
_TENSOR: dict[str, object] = {
    "description": "A tensor in row-major order; with the two sparse fields, in CSR format.",
    "type": "object",
    "properties": {
        "data": {"type": "array", "items": {"type": ["number", "null"]}},
        "dtype": {"enum": ["int64", "float32"]},
        "shape": {"anyOf": [_INTEGERS, {"type": "null"}]},
        "sparse_crow_indices": {"anyOf": [_INTEGERS, {"type": "null"}]},
        "sparse_col_indices": {"anyOf": [_INTEGERS, {"type": "null"}]},
    },
    "required": ["data", "dtype"],
}


def schema_ref(name: str) -> dict[str, object]:
    """A reference to a schema of the document."""
    return {"$ref": REF_PREFIX + name}


def _object_schema(
    description: str, required: list[str], **properties: object
) -> dict[str, object]:
    return {
        "description": description,
        "type": "object",
        "properties": properties,
        "required": required,
    }


_TEXT = {"type": "string"}
_NUMBERS = {"type": "array", "items": {"type": ["number", "null"]}}
_SEQ_ID = {"type": ["integer", "null"], "minimum": 0}
_TENSORS = {"type": "object", "additionalProperties": schema_ref("TensorData")}

#: Types without a struct, because clients usually send them as protobuf.
_PROTOBUF_SCHEMAS: dict[type[object], dict[str, object]] = {
    types.ForwardBackwardRequest: _object_schema(
        "Request of a forward and backward pass, in the form of older clients.",
        ["forward_backward_input", "model_id"],
        forward_backward_input=schema_ref("ForwardBackwardInput"),
        model_id=_TEXT,
        seq_id=_SEQ_ID,
    ),
    types.ForwardRequest: _object_schema(
        "Request of a forward pass, in the form of older clients.",
        ["forward_input", "model_id"],
        forward_input=schema_ref("ForwardBackwardInput"),
        model_id=_TEXT,
        seq_id=_SEQ_ID,
    ),
    types.ForwardBackwardOutput: _object_schema(
        "The result of a pass.",
        [],
        loss_fn_output_type=_TEXT,
        loss_fn_outputs={"type": "array", "items": _TENSORS},
        metrics={"type": "object", "additionalProperties": {"type": ["number", "null"]}},
    ),
    types.SampleResponse: _object_schema(
        "The sampled sequences.",
        ["sequences"],
        sequences={"type": "array", "items": schema_ref("SampledSequence")},
        prompt_logprobs=_NUMBERS,
        topk_prompt_logprobs={"type": "array"},
        target_prompt_logprobs=schema_ref("TensorData"),
        prompt_cache_hit_tokens={"type": "integer"},
        prompt_alt_tokens={"type": "object"},
    ),
}
_SHARED_SCHEMAS: dict[str, dict[str, object]] = {
    "TensorData": _TENSOR,
    "ForwardBackwardInput": _object_schema(
        "The examples of one pass and the loss function.",
        ["data", "loss_fn"],
        data={"type": "array", "items": schema_ref("Datum")},
        loss_fn=_TEXT,
        loss_fn_config={
            "type": ["object", "null"],
            "additionalProperties": {"type": ["number", "string"]},
        },
    ),
    "Datum": _object_schema(
        "One training example: the model input, and the tensors that the loss needs.",
        ["model_input", "loss_fn_inputs"],
        model_input=schema_ref("ModelInput"),
        loss_fn_inputs=_TENSORS,
    ),
    "SampledSequence": _object_schema(
        "One sampled sequence.",
        ["tokens"],
        stop_reason={"enum": ["stop", "length"]},
        tokens=_INTEGERS,
        logprobs=_NUMBERS,
        topk_logprobs={"type": "array"},
    ),
    "Fault": _object_schema(
        "Why a request or its job failed, and whether the user or the server caused it.",
        ["error", "category"],
        error=_TEXT,
        detail=_TEXT,
        category={"enum": ["unknown", "server", "user"]},
    ),
    "Pending": _object_schema(
        "The result is not ready; poll again.",
        ["queue_state"],
        request_id=_TEXT,
        queue_state={"enum": ["active", "paused_capacity", "paused_rate_limit"]},
        queue_state_reason=_TEXT,
    ),
    "CompleteMetadata": _object_schema(
        "The result is ready but large; request it again without allow_metadata_only.",
        ["status", "response_payload_size"],
        status={"const": "complete_metadata"},
        response_payload_size={"type": "integer"},
    ),
}
#: Types that open unions and hand-written schemas refer to.
_REFERENCED_TYPES: tuple[type[object], ...] = (
    types.ModelInput,
    AdamOptimizerConfig,
    DimuonOptimizerConfig,
    DimuonParams,
)


def schema_name(type_: type[object]) -> str:
    """The name of a type's schema in the document."""
    return type_.__name__


def build_schemas(messages: Iterable[type[object]]) -> dict[str, object]:
    """The schemas of these messages and of everything they refer to, by name."""
    unique = list(dict.fromkeys(messages))
    structs: list[type[object]] = [
        type_ for type_ in (*unique, *_REFERENCED_TYPES) if type_ not in _PROTOBUF_SCHEMAS
    ]
    unions = [member for union in _find_open_unions(structs) for member in _union_members(union)]
    _, generated = msgspec.json.schema_components(
        [*structs, *unions], schema_hook=_schema_hook, ref_template=REF_PREFIX + "{name}"
    )
    hand_written = {
        schema_name(type_): _PROTOBUF_SCHEMAS[type_]
        for type_ in unique
        if type_ in _PROTOBUF_SCHEMAS
    }
    return dict(sorted({**generated, **_SHARED_SCHEMAS, **hand_written}.items()))


def _find_open_unions(structs: Iterable[type[object]]) -> list[object]:
    """The open unions that occur anywhere in these messages."""
    unions: list[object] = []

    def collect(type_: object) -> dict[str, object]:
        if hasattr(type_, "union") and type_.union not in unions:
            unions.append(type_.union)
        return {"type": "object"}

    msgspec.json.schema_components(list(structs), schema_hook=collect)
    return unions


def _union_members(union: object) -> tuple[type[object], ...]:
    return get_args(union) or ((union,) if isinstance(union, type) else ())


def _schema_hook(type_: object) -> dict[str, object]:
    """The schema of a type that msgspec does not know."""
    if type_ is types.TensorData:
        return schema_ref("TensorData")
    if hasattr(type_, "union"):
        members = [schema_ref(schema_name(member)) for member in _union_members(type_.union)]
        return {"anyOf": [*members, {"type": "object", "required": ["type"]}, {"type": "null"}]}
    if isinstance(type_, type) and issubclass(type_, OpenRecord):
        return {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
    raise NotImplementedError(f"{type_!r} has no schema")
