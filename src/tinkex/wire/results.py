"""Decode results of jobs and error bodies, in protobuf and in every known JSON dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from tinkex import types
from tinkex.errors import RequestErrorCategory
from tinkex.types.base import decode_hook, preload_type
from tinkex.wire.codec import (
    forward_backward_output_from_json,
    sample_response_from_json,
)
from tinkex.wire.endpoints import Endpoint, JobEndpoint
from tinkex.wire.proto import decode_forward_backward_output, decode_sample_response

ResultT = TypeVar("ResultT")

_PROTO_DECODERS: dict[type, Callable[[bytes], Any]] = {
    types.ForwardBackwardOutput: decode_forward_backward_output,
    types.SampleResponse: decode_sample_response,
}
_JSON_DECODERS: dict[type, Callable[[object], Any]] = {
    types.ForwardBackwardOutput: forward_backward_output_from_json,
    types.SampleResponse: sample_response_from_json,
}


def has_proto_result(endpoint: Endpoint[object, object]) -> bool:
    """Return whether the result is requested, and usually sent, as protobuf."""
    return endpoint.result_type in _PROTO_DECODERS


def decode_result(
    endpoint: JobEndpoint[object, ResultT], content: bytes, is_proto: bool
) -> ResultT:
    """Decode a result; raises ValueError or a msgspec error if it is invalid."""
    result_type = endpoint.result_type
    result: ResultT
    if is_proto:
        if result_type not in _PROTO_DECODERS:
            raise ValueError(f"{endpoint.name} has no binary result")
        result = _PROTO_DECODERS[result_type](content)
        return result
    body = unwrap_result(msgspec.json.decode(content))
    if result_type in _JSON_DECODERS:
        result = _JSON_DECODERS[result_type](body)
        return result
    return msgspec.convert(body, preload_type(result_type), strict=False, dec_hook=decode_hook)


def unwrap_result(body: object) -> object:
    """Return the result inside `{status: completed, result: ...}`, or the body itself."""
    if isinstance(body, dict) and "result" in body and "status" in body:
        return body["result"]
    return body


class ErrorBody(NamedTuple):
    """The message and category of a failure."""

    message: str
    category: RequestErrorCategory | None


def parse_error_body(body: object) -> ErrorBody | None:
    """Parse the JSON body of a failure in any known dialect; None if it has no message."""
    if isinstance(body, str) and body.strip():
        return ErrorBody(body.strip(), None)
    if not isinstance(body, Mapping):
        return None
    messages = [body[key] for key in ("error", "detail", "message") if body.get(key) is not None]
    if not messages:
        return None
    message = next(filter(None, messages), None)
    raw = body.get("category")
    category = RequestErrorCategory.parse(raw) if raw is not None else None
    return ErrorBody(_format_message(message) if message else "no reason was given", category)


def make_error_body(message: str, category: RequestErrorCategory) -> dict[str, str]:
    """Return the JSON body of a failed request."""
    return {"error": message, "detail": message, "category": str(category)}


def _format_message(message: object) -> str:
    if isinstance(message, Mapping):
        inner = message.get("message") or message.get("detail") or message.get("msg")
        where = ".".join(str(part) for part in message.get("loc") or ())
        text = str(inner) if inner else str(dict(message))
        return f"{where}: {text}" if where else text
    if isinstance(message, list):
        return "; ".join(_format_message(part) for part in message)
    return str(message)
