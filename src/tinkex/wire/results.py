"""Results of promises: which are binary, and how any dialect's bytes become a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tinkex import types
from tinkex.errors import RequestErrorCategory
from tinkex.types.base import decode_hook, preload_type
from tinkex.wire.codec import (
    forward_backward_output_from_json,
    sample_response_from_json,
)
from tinkex.wire.endpoints import Endpoint
from tinkex.wire.proto import decode_forward_backward_output, decode_sample_response

_PROTO_DECODERS: dict[type[Any], Callable[[bytes], Any]] = {
    types.ForwardBackwardOutput: decode_forward_backward_output,
    types.SampleResponse: decode_sample_response,
}
_JSON_DECODERS: dict[type[Any], Callable[[Any], Any]] = {
    types.ForwardBackwardOutput: forward_backward_output_from_json,
    types.SampleResponse: sample_response_from_json,
}


def has_proto_result(endpoint: Endpoint[Any, Any]) -> bool:
    """True when the result is asked for, and usually comes, as protobuf."""
    return endpoint.promised in _PROTO_DECODERS


def decode_result(endpoint: Endpoint[Any, Any], content: bytes, is_proto: bool) -> Any:
    """Turn a result's bytes into its value; raises ValueError or a msgspec error if it cannot."""
    promised = endpoint.promised
    if promised is None:
        raise ValueError(f"{endpoint.name} promises nothing")
    if is_proto:
        if promised not in _PROTO_DECODERS:
            raise ValueError(f"{endpoint.name} has no binary result")
        return _PROTO_DECODERS[promised](content)
    if promised in _JSON_DECODERS:
        return _JSON_DECODERS[promised](unwrap_result(msgspec.json.decode(content)))
    body = unwrap_result(msgspec.json.decode(content))
    return msgspec.convert(body, preload_type(promised), strict=False, dec_hook=decode_hook)


def unwrap_result(body: Any) -> Any:
    """The result inside `{status: completed, result: ...}`, or the body itself."""
    if isinstance(body, dict) and "result" in body and "status" in body:
        return body["result"]
    return body


class ErrorBody(NamedTuple):
    """What a body says about a failure."""

    message: str
    category: RequestErrorCategory | None


def parse_error_body(body: object) -> ErrorBody | None:
    """Find the message and category in a JSON body of any known dialect, or None."""
    if isinstance(body, str) and body.strip():
        return ErrorBody(body.strip(), None)
    if not isinstance(body, Mapping):
        return None
    said = [body[key] for key in ("error", "detail", "message") if body.get(key) is not None]
    if not said:
        return None
    message = next(filter(None, said), None)
    raw = body.get("category")
    category = RequestErrorCategory.parse(raw) if raw is not None else None
    return ErrorBody(_format_message(message) if message else "no reason was given", category)


def make_error_body(message: str, category: RequestErrorCategory) -> dict[str, str]:
    """The body of a failed request: the error, and whose fault it is."""
    return {"error": message, "detail": message, "category": str(category)}


def _format_message(message: Any) -> str:
    if isinstance(message, Mapping):
        inner = message.get("message") or message.get("detail") or message.get("msg")
        where = ".".join(str(part) for part in message.get("loc") or ())
        text = str(inner) if inner else str(dict(message))
        return f"{where}: {text}" if where else text
    if isinstance(message, list):
        return "; ".join(_format_message(part) for part in message)
    return str(message)
