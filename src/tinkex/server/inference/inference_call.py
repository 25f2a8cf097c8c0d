"""What handlers of inference endpoints work with: calls, responses, and rows of the table."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from tinkex.server.http.request_context import (
    MAX_IDEMPOTENCY_KEY_CHARS,
    CallerIdentity,
    RawResponse,
    Services,
)
from tinkex.server.inference.error_bodies import ApiFamily, Failure

RequestT_co = TypeVar("RequestT_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceCall(Generic[RequestT_co]):
    """An authenticated and decoded request to an inference endpoint."""

    identity: CallerIdentity
    request: RequestT_co
    """The decoded body; None for routes without one."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers by lower-case name."""
    query: Mapping[str, str] = field(default_factory=dict)
    model_id: str = ""
    """The model in the path."""

    @property
    def tenant_id(self) -> str:
        """The caller's tenant."""
        return self.identity.tenant_id

    @property
    def idempotency_key(self) -> str:
        """The Idempotency-Key header, cut to the maximum length; empty if there is none."""
        return self.headers.get("idempotency-key", "")[:MAX_IDEMPOTENCY_KEY_CHARS]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStream:
    """A response of server-sent events."""

    chunks: AsyncGenerator[bytes, None]
    """Encoded events. An error before the first one becomes a normal error response."""
    keep_alive: bytes
    """Sent after a silence."""
    encode_error: Callable[[Failure], bytes]
    """Encodes an error after the first event, which ends the stream."""
    headers: Mapping[str, str] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None
    """Called at the end in any case, also if no event was read."""


InferenceResponse: TypeAlias = RawResponse | EventStream
InferenceHandler: TypeAlias = Callable[[Services, InferenceCall[Any]], Awaitable[InferenceResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRoute:
    """An inference endpoint."""

    name: str
    """Its label in metrics."""
    method: str
    path: str
    """Below the base paths of its family; `{model}` at the end matches the rest of the path."""
    family: ApiFamily
    handler: InferenceHandler
    request_type: Any = None
    """The type of the JSON body; None for none."""
    is_rooted: bool = False
    """Whether the path is not below the base paths of its family."""
