"""Binary results as older clients read them: JSON, where null stands for NaN and infinity."""

from __future__ import annotations

from typing import Any

import msgspec

from tinkex.jobs.kinds import JobKind
from tinkex.types import TensorData
from tinkex.wire.proto import decode_forward_backward_output, decode_sample_response
from tinkex.wire.proto.json_twins import JSON_FIELDS


def to_json_compat(kind: str, result: bytes) -> bytes:
    """A result of one of the BINARY kinds as JSON."""
    if kind == JobKind.SAMPLE:
        return msgspec.json.encode(_to_builtins(decode_sample_response(result)))
    return msgspec.json.encode(_to_builtins(decode_forward_backward_output(result)))


def _to_builtins(value: Any) -> Any:
    """The value in builtins; msgspec itself writes NaN and infinities as null."""
    if isinstance(value, TensorData):
        return value.to_wire()
    if isinstance(value, list):
        return [_to_builtins(item) for item in value]
    if isinstance(value, dict):
        return {name: _to_builtins(item) for name, item in value.items()}
    if type(value) not in JSON_FIELDS:
        return value
    items = {name: _to_builtins(getattr(value, name)) for name in JSON_FIELDS[type(value)]}
    return {name: item for name, item in items.items() if item is not None}
