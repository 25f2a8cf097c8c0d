"""A row of the endpoint table: path, messages, timeouts and retries."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypedDict, TypeVar, Unpack

from tinkex.errors import InvalidInput
from tinkex.ids import check_checkpoint_id, path_segment
from tinkex.types.futures import UntypedAPIFuture
from tinkex.wire.messages import Empty

RequestT = TypeVar("RequestT", covariant=True)
ReplyT = TypeVar("ReplyT", covariant=True)
ResultT = TypeVar("ResultT", covariant=True)
PREFIX = "/api/v1"
SMALL_BODY_BYTES = 256 * 1024
#: Endpoints with large bodies: tensors or prompts.
LARGE_BODY_ENDPOINTS = frozenset({"forward_backward", "forward", "asample", "create_custom_loss"})


class BodyFormat(StrEnum):
    """The format of a request body."""

    JSON = "json"  #: a JSON object
    PROTO = "proto"  #: protobuf, optionally zstd-compressed
    NONE = "none"  #: no body; arguments are in the path and the query


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[RequestT, ReplyT]):
    """One row of the table."""

    name: str
    """Unique name, used in logs, metrics and tests."""
    method: str
    """The HTTP method."""
    path: str
    """The path below /api/v1, with {placeholders}."""
    request: type[RequestT]
    """The type of the request."""
    reply: type[ReplyT]
    """The type of the immediate response."""
    body: BodyFormat = BodyFormat.JSON
    """The format of the request body."""
    max_body_bytes: int | None = SMALL_BODY_BYTES
    """Maximum body size; None means the server's `max_body_bytes` setting."""
    result_type: type[object] | None = None
    """The result type of the future, if the reply is a future."""
    request_type: str = ""
    """The value of X-Tinker-Request-Type for the future."""
    query: frozenset[str] = field(default_factory=frozenset)
    """Names allowed in the query string."""
    timeout_seconds: float | None = None
    """The client's timeout; None means its configured one."""
    is_long_poll: bool = False
    """Whether the server delays the response until something has changed."""
    success_after_retry: frozenset[int] = frozenset()
    """Statuses that, after a lost response, mean that the lost attempt succeeded."""
    retries_conflict: bool = True
    """Whether 409 is retried; False where it means that the state is already as requested."""
    is_legacy: bool = False
    """Used only by SDKs up to 0.25."""
    is_tinkex_only: bool = False
    """Not part of the official API."""

    def url_path(self, **ids: str) -> str:
        """Return the path with quoted ids; a checkpoint id becomes two segments."""
        if "{" not in self.path:
            return PREFIX + self.path
        values = {name: _quote_placeholder(name, value) for name, value in ids.items()}
        missing = set(_PLACEHOLDER.findall(self.path)) - values.keys()
        if missing:
            raise InvalidInput(f"{self.name} needs {', '.join(sorted(missing))}")
        return PREFIX + _PLACEHOLDER.sub(lambda match: values[match[1]], self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEndpoint(Endpoint[RequestT, UntypedAPIFuture], Generic[RequestT, ResultT]):
    """An endpoint that responds with a future."""

    result_type: type[ResultT]
    """The result type of the future."""


_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def _quote_placeholder(name: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{name} must be a non-empty string, got {value!r}")
    if name == "checkpoint_id":
        return "/".join(map(path_segment, check_checkpoint_id(value).split("/")))
    if value in {".", ".."}:
        raise InvalidInput(f"{name} is not a valid id: {value!r}")
    return path_segment(value)


# --- rows of the table ------------------------------------------------------------------------
class EndpointOptions(TypedDict, total=False):
    """Optional fields of an endpoint."""

    query: frozenset[str]
    timeout_seconds: float
    is_long_poll: bool
    success_after_retry: frozenset[int]
    retries_conflict: bool
    is_legacy: bool
    is_tinkex_only: bool


def no_body(
    method: str, name: str, path: str, reply: type[ReplyT], **options: Unpack[EndpointOptions]
) -> Endpoint[Empty, ReplyT]:
    """Return an endpoint without a body: all arguments are in the path and the query."""
    return Endpoint(
        name=name,
        method=method,
        path=path,
        request=Empty,
        reply=reply,
        body=BodyFormat.NONE,
        **options,
    )


def post_json(
    name: str,
    path: str,
    request: type[RequestT],
    reply: type[ReplyT],
    *,
    method: str = "POST",
    max_body_bytes: int = SMALL_BODY_BYTES,
    **options: Unpack[EndpointOptions],
) -> Endpoint[RequestT, ReplyT]:
    """Return an endpoint with a JSON body and an immediate response."""
    return Endpoint(
        name=name,
        method=method,
        path=path,
        request=request,
        reply=reply,
        max_body_bytes=max_body_bytes,
        **options,
    )


def post_job(
    name: str,
    request: type[RequestT],
    result_type: type[ResultT],
    request_type: str,
    *,
    body: BodyFormat = BodyFormat.JSON,
    **options: Unpack[EndpointOptions],
) -> JobEndpoint[RequestT, ResultT]:
    """Return an endpoint that responds with a future; its path is its name."""
    return JobEndpoint(
        name=name,
        method="POST",
        path=f"/{name}",
        request=request,
        reply=UntypedAPIFuture,
        body=body,
        result_type=result_type,
        request_type=request_type,
        max_body_bytes=None if name in LARGE_BODY_ENDPOINTS else SMALL_BODY_BYTES,
        **options,
    )
