"""Results of promises: which are binary, and how any dialect's bytes become a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tinkex import types
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
