"""What a promise remembers of its request, read back when the work is done."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tinkex import types
from tinkex.errors import InvalidInput
from tinkex.types.base import Message
from tinkex.wire.codec import decode_json
from tinkex.wire.proto import decode_forward_backward_request

T = TypeVar("T")


class LoadPayload(Message):
    """Which weights to load, found and permitted when the promise was made."""

    path: str
    """The address, as the client gave it."""
    checkpoint_id: str
    """The checkpoint it stood for then."""
    with_optimizer: bool


def decode_payload(payload: bytes, type_: type[T]) -> T:
    """A request of this type; InvalidInput if it is none."""
    try:
        return decode_json(payload, type_)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"the request cannot be read: {error}") from None


def decode_pass_payload(
    payload: bytes, *, is_proto: bool, is_forward_only: bool
) -> types.ForwardBackwardInput:
    """The examples and the loss of a pass, however it was written."""
    if is_proto:
        request, _ = decode_forward_backward_request(payload)
        return request.forward_backward_input
    if is_forward_only:
        # The older way to say so is an endpoint of its own, with a name of its own for the input.
        found = msgspec.json.decode(payload)
        if isinstance(found, dict) and "forward_input" in found:
            return decode_payload(payload, types.ForwardRequest).forward_input
    return decode_payload(payload, types.ForwardBackwardRequest).forward_backward_input
