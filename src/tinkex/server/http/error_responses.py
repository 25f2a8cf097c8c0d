"""What an error is answered with: a status, one sentence, and whose fault it is."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tinkex.errors import (
    APIStatusError,
    CheckpointError,
    InvalidInput,
    RequestErrorCategory,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TinkexError,
)
from tinkex.ids import new_id
from tinkex.logs import get_logger
from tinkex.server.http.request_context import RawResponse
from tinkex.system.disk_errors import is_disk_full
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import WireError
from tinkex.wire.results import make_error_body

LOG = get_logger(__name__)
#: When a client that met a busy or full database should come again.
STORE_RETRY_SECONDS = 1.0

HANDLED_ERRORS = (
    TinkexError,
    msgspec.DecodeError,
    WireError,
    # What the request's own values did to a driver or a codec: too large, or not text.
    OverflowError,
    UnicodeError,
    RecursionError,
)
"""What can be answered with a sentence; anything else is a defect of the server."""


def response_for_error(error: BaseException) -> RawResponse:
    """The answer to a request that raised one of `Refused`."""
    if isinstance(error, APIStatusError):
        return error_response(
            error.status_code, error.message, error.category, _error_headers(error)
        )
    if isinstance(error, StoreError):
        message = error.message
        if isinstance(error, StoreUnavailable):
            # Where the database is, and what it said, is for the log and not for tenants.
            LOG.error("%s", message)
            message = "the server's database cannot be used now; try again"
        return error_response(
            503, message, error.category, retry_after_headers(STORE_RETRY_SECONDS)
        )
    if isinstance(error, TinkexError):
        is_users = error.category is RequestErrorCategory.User
        # Damaged files stay damaged: the same request fails again.
        headers = {"x-should-retry": "false"} if isinstance(error, CheckpointError) else None
        return error_response(422 if is_users else 500, error.message, error.category, headers)
    return error_response(422, _message_for(error), RequestErrorCategory.User)


def error_response(
    status: int,
    message: str,
    category: RequestErrorCategory,
    headers: Mapping[str, str] | None = None,
) -> RawResponse:
    """An error as an answer; its body is never empty."""
    body = encode_json(make_error_body(message, category))
    return RawResponse(status=status, body=body, headers=headers or {})


def internal_error_response(error: BaseException, operation: str) -> RawResponse:
    """The answer to a defect: an id, under which the log says everything."""
    if is_disk_full(error):
        LOG.error("%s: the disk is full: %s", operation, error)
        return response_for_error(
            StoreFull("the server's disk is full; free space there, then try again")
        )
    incident = new_id()
    LOG.error("%s failed; incident %s", operation, incident, exc_info=error)
    message = f"the server failed; its log says why under the id {incident}"
    return error_response(500, message, RequestErrorCategory.Server)


def retry_after_headers(seconds: float) -> dict[str, str]:
    """Headers that say when to come again: whole seconds for all, milliseconds for some."""
    return {
        "retry-after": str(max(1, round(seconds))),
        "retry-after-ms": str(max(1, round(seconds * 1000))),
    }


def _error_headers(error: APIStatusError) -> Mapping[str, str]:
    headers: dict[str, str] = {}
    if error.retry_after_seconds is not None:
        headers |= retry_after_headers(error.retry_after_seconds)
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    if error.status_code == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def _message_for(error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(error, msgspec.ValidationError) and isinstance(cause, InvalidInput):
        return cause.message
    if isinstance(error, RecursionError):
        return "the request is nested too deeply"
    if isinstance(error, OverflowError):
        return f"a number of the request is too large: {error}"
    if isinstance(error, UnicodeError):
        return "a text of the request is not valid UTF-8; encode it as UTF-8"
    return f"the request cannot be read: {error}"
