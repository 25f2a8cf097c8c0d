"""Encoding and decoding of the protobuf messages."""

from __future__ import annotations

from tinkex.wire.proto.outputs import (
    decode_forward_backward_output,
    encode_forward_backward_output,
)
from tinkex.wire.proto.protobuf import WireError
from tinkex.wire.proto.sampling import decode_sample_response, encode_sample_response
from tinkex.wire.proto.training import (
    decode_forward_backward_request,
    encode_forward_backward_request,
)

__all__ = [
    "WireError",
    "decode_forward_backward_output",
    "decode_forward_backward_request",
    "decode_sample_response",
    "encode_forward_backward_output",
    "encode_forward_backward_request",
    "encode_sample_response",
]
