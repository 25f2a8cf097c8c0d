"""What a row of the endpoint table says: path, messages, and how a client waits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from tinkex.errors import InvalidInput
from tinkex.ids import check_checkpoint_id, path_segment

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")
PREFIX = "/api/v1"
SMALL_BODY_BYTES = 256 * 1024
#: The jobs that carry tensors or prompts.
LARGE_BODY_ENDPOINTS = frozenset({"forward_backward", "forward", "asample", "create_custom_loss"})


class BodyFormat(StrEnum):
    """How a request's body is written."""

    JSON = "json"  #: a JSON object
    PROTO = "proto"  #: protobuf, perhaps zstd-compressed
    NONE = "none"  #: no body; arguments are in the path and the query


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[RequestT, ReplyT]):
    """One row of the table."""

    name: str
    """The row's own name, used in logs, metrics and tests."""
    method: str
    """The HTTP method."""
    path: str
    """The path below /api/v1, with {placeholders}."""
    request: type[RequestT]
    """What is sent."""
    reply: type[ReplyT]
    """What comes back at once."""
    body: BodyFormat = BodyFormat.JSON
    """How the request is written."""
    max_body_bytes: int | None = SMALL_BODY_BYTES
    """The largest body; None leaves it to the server's `max_body_bytes`: tensors and prompts."""
    promised: type[Any] | None = None
    """What the promise resolves to, when the reply is a promise."""
    request_type: str = ""
    """The promise's kind in X-Tinker-Request-Type."""
    query: frozenset[str] = field(default_factory=frozenset)
    """Names allowed in the query string."""
    timeout_seconds: float | None = None
    """How long the client waits for the answer; None leaves it to its config."""
    is_long_poll: bool = False
    """Whether the server holds the answer back until there is news."""
    settled_by: frozenset[int] = frozenset()
    """Refusals that, after a lost answer, mean that the lost one was a yes."""
    retries_conflict: bool = True
    """Whether 409 means "locked, try again" here; False where it means "already so"."""
    is_legacy: bool = False
    """Spoken by SDKs up to 0.25 only."""
    is_own: bool = False
    """Not part of the official API: only tinkex servers have it."""

    def url_path(self, **ids: str) -> str:
        """Fill the placeholders, each quoted as one segment (checkpoint ids as two)."""
        if "{" not in self.path:
            return PREFIX + self.path
        values = {name: _quote_placeholder(name, value) for name, value in ids.items()}
        missing = set(_PLACEHOLDER.findall(self.path)) - values.keys()
        if missing:
            raise InvalidInput(f"{self.name} needs {', '.join(sorted(missing))}")
        return PREFIX + _PLACEHOLDER.sub(lambda match: values[match[1]], self.path)


_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def _quote_placeholder(name: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{name} must be a non-empty string, got {value!r}")
    if name == "checkpoint_id":
        return "/".join(map(path_segment, check_checkpoint_id(value).split("/")))
    if value in {".", ".."}:
        raise InvalidInput(f"{name} is not a valid id: {value!r}")
    return path_segment(value)
