"""Map exceptions to error responses: status, message, category and headers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tinkex.checkpoint.places import BlobsUnavailable
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
#: Retry-After for a busy or full database.
STORE_RETRY_SECONDS = 1.0

HANDLED_ERRORS = (
    TinkexError,
    msgspec.DecodeError,
    WireError,
    # Caused by values of the request: too large for a driver, or not valid text.
    OverflowError,
    UnicodeError,
    RecursionError,
)
"""Expected errors; anything else is a defect of the server."""


def response_for_error(error: BaseException) -> RawResponse:
    """The response to a request that raised one of `HANDLED_ERRORS`."""
    if isinstance(error, APIStatusError):
        return error_response(
            error.status_code, error.message, error.category, _error_headers(error)
        )
    if isinstance(error, StoreError):
        message = error.message
        if isinstance(error, StoreUnavailable):
            # The address and the error of the database are for the log, not for tenants.
            LOG.error("%s", message)
            message = "the server's database is unavailable; try again"
        return error_response(
            503, message, error.category, retry_after_headers(STORE_RETRY_SECONDS)
        )
    if isinstance(error, BlobsUnavailable):
        LOG.error("%s", error.message)
        return error_response(
            503,
            "the server's object store is unavailable; try again",
            error.category,
            retry_after_headers(STORE_RETRY_SECONDS),
        )
    if isinstance(error, TinkexError):
        status = 422 if error.category is RequestErrorCategory.User else 500
        # Damaged files stay damaged: the same request would fail again.
        headers = {"x-should-retry": "false"} if isinstance(error, CheckpointError) else None
        return error_response(status, error.message, error.category, headers)
    return error_response(422, _message_for(error), RequestErrorCategory.User)


def error_response(
    status: int,
    message: str,
    category: RequestErrorCategory,
    headers: Mapping[str, str] | None = None,
) -> RawResponse:
    """Build an error response."""
    body = encode_json(make_error_body(message, category))
    return RawResponse(status=status, body=body, headers=headers or {})


def internal_error_response(error: BaseException, operation: str) -> RawResponse:
    """The response to an unexpected error: an incident id that the log explains."""
    if is_disk_full(error):
        LOG.error("%s: the disk is full: %s", operation, error)
        return response_for_error(
            StoreFull("the server's disk is full; free space, then try again")
        )
    incident_id = new_id()
    LOG.error("%s failed; incident %s", operation, incident_id, exc_info=error)
    message = f"internal server error; the server's log has details under the id {incident_id}"
    return error_response(500, message, RequestErrorCategory.Server)


def retry_after_headers(seconds: float) -> dict[str, str]:
    """Retry headers in whole seconds, and in milliseconds for clients that read them."""
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
        return f"a number in the request is too large: {error}"
    if isinstance(error, UnicodeError):
        return "a string in the request is not valid UTF-8; encode it as UTF-8"
    return f"cannot decode the request: {error}"
