"""Results of promises: which are binary, and how any dialect's bytes become a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tinkex import types
from tinkex.types.base import decode_hook, learned
from tinkex.wire.codec import (
    forward_backward_output_from_json,
    sample_response_from_json,
)
from tinkex.wire.endpoints import Endpoint
from tinkex.wire.proto import decode_forward_backward_output, decode_sample_response

_FROM_PROTO: dict[type[Any], Callable[[bytes], Any]] = {
    types.ForwardBackwardOutput: decode_forward_backward_output,
    types.SampleResponse: decode_sample_response,
}
_FROM_JSON: dict[type[Any], Callable[[Any], Any]] = {
    types.ForwardBackwardOutput: forward_backward_output_from_json,
    types.SampleResponse: sample_response_from_json,
}


def is_binary(endpoint: Endpoint[Any, Any]) -> bool:
    """True when the result is asked for, and usually comes, as protobuf."""
    return endpoint.promised in _FROM_PROTO


def decode_result(endpoint: Endpoint[Any, Any], content: bytes, is_proto: bool) -> Any:
    """Turn a result's bytes into its value; raises ValueError or a msgspec error if it cannot."""
    promised = endpoint.promised
    if promised is None:
        raise ValueError(f"{endpoint.name} promises nothing")
    if is_proto:
        if promised not in _FROM_PROTO:
            raise ValueError(f"{endpoint.name} has no binary result")
        return _FROM_PROTO[promised](content)
    if promised in _FROM_JSON:
        return _FROM_JSON[promised](unwrapped(msgspec.json.decode(content)))
    body = unwrapped(msgspec.json.decode(content))
    return msgspec.convert(body, learned(promised), strict=False, dec_hook=decode_hook)


def unwrapped(body: Any) -> Any:
    """The result inside `{status: completed, result: ...}`, or the body itself."""
    if isinstance(body, dict) and "result" in body and "status" in body:
        return body["result"]
    return body
