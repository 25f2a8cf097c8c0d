"""The exceptions of this package, and the classification of failures.

TinkexError                         also exported as TinkerError
├── ConfigError                     a setting is missing or wrong
├── InvalidInput                    rejected before anything was sent
├── ClientClosed                    the client was closed while work was waiting
├── WrongThread                     a blocking call on an I/O thread
├── DownloadError                   a file is incomplete, changed or unsafe
├── CheckpointError                 saved files are missing or damaged
├── StoreError                      the server's database cannot be used now  (retryable)
│   └── StoreBusy, StoreFull, StoreUnavailable
├── APIError
│   ├── APIConnectionError          no response                              (retryable)
│   │   └── APITimeoutError         ConnectTimeoutError, ResultTimeoutError
│   ├── APIResponseValidationError  an invalid response
│   └── APIStatusError              an error status
│       ├── BadRequestError 400, AuthenticationError 401, BillingError 402,
│       │   PermissionDeniedError 403, NotFoundError 404, UnprocessableEntityError 422
│       ├── ConflictError 409, PromiseExpiredError 410
│       ├── RateLimitError 429                                               (retryable)
│       └── InternalServerError 5xx                                          (retryable)
└── RequestFailedError              the job failed; .category tells who caused it
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import Any, ClassVar, NamedTuple


class RequestErrorCategory(StrEnum):
    """Who caused a failure."""

    Unknown = auto()  #: not reported
    Server = auto()  #: the server; the same request may succeed later
    User = auto()  #: the request; it will fail again

    @classmethod
    def parse(cls, text: object) -> RequestErrorCategory:
        """Parse a category, case-insensitive; anything else is Unknown."""
        return cls(str(text))

    @classmethod
    def _missing_(cls, value: object) -> RequestErrorCategory:
        lowered = str(value).lower()
        return next((member for member in cls if member.value == lowered), cls.Unknown)


class FailureClass(NamedTuple):
    """The classification of a failure."""

    is_user_error: bool
    is_retryable: bool


#: Client errors that the user did not cause.
NOT_USER_ERROR_STATUSES = frozenset({408, 409, 410, 429})
#: Client errors that are retried. Not 410: an expired future stays expired.
RETRYABLE_STATUSES = frozenset({408, 409, 429})


def classify_failure(
    status: int | None,
    category: RequestErrorCategory | None = None,
    should_retry: bool | None = None,
) -> FailureClass:
    """Classify a failure by header, then category, then status.

    `should_retry` is the `x-should-retry` header; `status` None means that there was no response.
    """
    by_status = _classify_status(status)
    if should_retry is True:
        return FailureClass(is_user_error=False, is_retryable=True)
    if should_retry is False:
        return FailureClass(by_status.is_user_error, is_retryable=False)
    if category is RequestErrorCategory.User:
        return FailureClass(is_user_error=True, is_retryable=False)
    if category is not None:
        return FailureClass(is_user_error=False, is_retryable=True)
    return by_status


def _classify_status(status: int | None) -> FailureClass:
    if status is None or status >= 500:
        return FailureClass(is_user_error=False, is_retryable=True)
    if 400 <= status < 500:
        return FailureClass(status not in NOT_USER_ERROR_STATUSES, status in RETRYABLE_STATUSES)
    return FailureClass(is_user_error=False, is_retryable=False)


class TinkexError(Exception):
    """Base class of all exceptions of this package."""

    hint: str | None = None
    status: int | None = None
    category: RequestErrorCategory = RequestErrorCategory.Unknown
    verdict: FailureClass = FailureClass(is_user_error=False, is_retryable=False)

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        self.message = message or (type(self).__doc__ or "").partition("\n")[0]
        super().__init__(self.message)
        if hint is not None:
            self.hint = hint

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        """The hint, which Python prints below the message."""
        return [self.hint] if self.hint else []

    @property
    def is_user_error(self) -> bool:
        """Whether the same request would fail again."""
        return self.verdict.is_user_error

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.verdict.is_retryable

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _rebuild(
    cls: type[TinkexError], args: tuple[object, ...], state: dict[str, object]
) -> TinkexError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


#: The name of the base class in the official package.
TinkerError = TinkexError

_USER_ERROR = FailureClass(is_user_error=True, is_retryable=False)


class ConfigError(TinkexError, ValueError):
    """A setting is missing or wrong."""

    category = RequestErrorCategory.User
    verdict = _USER_ERROR


class InvalidInput(TinkexError, ValueError):
    """The input was rejected before anything was sent."""

    category = RequestErrorCategory.User
    verdict = _USER_ERROR


class ClientClosed(TinkexError, RuntimeError):
    """The client is closed."""

    category = RequestErrorCategory.User
    verdict = _USER_ERROR
    hint = "Create a new ServiceClient; a closed one cannot be used again."


class WrongThread(TinkexError, RuntimeError):
    """A blocking call on an I/O thread, which would deadlock."""

    category = RequestErrorCategory.User
    verdict = _USER_ERROR
    hint = (
        "In a callback, use the future's value only when it is done, or await it on your own loop."
    )


class StoreError(TinkexError):
    """The server's database cannot be used now."""

    category = RequestErrorCategory.Server
    verdict = FailureClass(is_user_error=False, is_retryable=True)


class StoreBusy(StoreError):
    """The database is locked by another writer for too long."""


class StoreFull(StoreError):
    """The disk of the server is full."""


class StoreUnavailable(StoreError):
    """The database is unavailable."""


class DownloadError(TinkexError):
    """A download is incomplete, changed or unsafe."""

    hint = "Run the download again: it resumes where it stopped."


class CheckpointError(TinkexError):
    """Saved files are missing or damaged."""

    category = RequestErrorCategory.Server
    hint = "Use another checkpoint; these files are not what was written."


class APIError(TinkexError):
    """A failed request to the server."""

    is_web_page: bool = False
    """Whether the response was HTML, so that the URL is not that of a Tinker server."""

    def __init__(
        self,
        message: str = "",
        request: object = None,
        *,
        body: object | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.request = request
        self.body = body


class APIConnectionError(APIError):
    """No response; the request may or may not have reached the server."""

    verdict = classify_failure(None)
    category = RequestErrorCategory.Server

    def __init__(
        self,
        request: object = None,
        message: str = "Connection error.",
        *,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, request, hint=hint)


class APITimeoutError(APIConnectionError, TimeoutError):
    """The server did not respond in time."""

    def __init__(
        self,
        request: object = None,
        message: str = "Request timed out.",
        *,
        hint: str | None = None,
    ) -> None:
        super().__init__(request, message, hint=hint)


class ConnectTimeoutError(APITimeoutError):
    """The server did not accept a connection in time."""


class ResultTimeoutError(APITimeoutError):
    """The result was not ready within poll_timeout_seconds; the job may still finish."""

    verdict = FailureClass(is_user_error=False, is_retryable=False)
    hint = "Raise poll_timeout_seconds, or set it to None to wait for ever."


class APIResponseValidationError(APIError):
    """The response does not match the protocol."""

    category = RequestErrorCategory.Server

    def __init__(
        self, response: Any = None, body: object | None = None, message: str | None = None
    ) -> None:
        text = message or "Data returned by API invalid for expected schema."
        super().__init__(text, getattr(response, "request", None), body=body)
        self.response = response
        self.status_code: int | None = getattr(response, "status_code", None)


class APIStatusError(APIError):
    """The server returned an error status."""

    status_code: int = 500
    default_hint: ClassVar[str | None] = None

    def __init__(
        self,
        message: str = "",
        response: Any = None,
        body: object | None = None,
        *,
        category: RequestErrorCategory | None = None,
        should_retry: bool | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message, getattr(response, "request", None), body=body)
        self.response = response
        self.status_code = getattr(response, "status_code", self.status_code)
        self.status = self.status_code
        self.verdict = classify_failure(self.status_code, category, should_retry)
        self.should_retry = should_retry
        self.retry_after_seconds = retry_after_seconds
        self.hint = self.default_hint
        self.category = category or _category_from_class(self.verdict)


def _category_from_class(verdict: FailureClass) -> RequestErrorCategory:
    return RequestErrorCategory.User if verdict.is_user_error else RequestErrorCategory.Server


class BadRequestError(APIStatusError):
    """HTTP 400: the request was malformed."""

    status_code = 400


class AuthenticationError(APIStatusError):
    """HTTP 401: the credential is missing or wrong."""

    status_code = 401
    default_hint = "Check the API key: pass api_key=..., or set TINKER_API_KEY."


class BillingError(APIStatusError):
    """HTTP 402: the account has a billing issue."""

    status_code = 402
    default_hint = "Set up billing for this account, then run the same command again."


class PermissionDeniedError(APIStatusError):
    """HTTP 403: the credential lacks the permission."""

    status_code = 403


class NotFoundError(APIStatusError):
    """HTTP 404: the resource does not exist or belongs to another user."""

    status_code = 404


class ConflictError(APIStatusError):
    """HTTP 409: the resource is already in another state."""

    status_code = 409


class PromiseExpiredError(APIStatusError):
    """HTTP 410: the result has expired; the operation must be submitted again."""

    status_code = 410
    default_hint = "Submit the operation again."


class UnprocessableEntityError(APIStatusError):
    """HTTP 422: the request is well-formed but invalid."""

    status_code = 422


class RateLimitError(APIStatusError):
    """HTTP 429: too many requests."""

    status_code = 429
    default_hint = "Slow down, or lower the number of concurrent requests."


class InternalServerError(APIStatusError):
    """HTTP 5xx: the server failed."""

    status_code = 500
    default_hint = "The server failed; try again later."


class RequestFailedError(TinkexError):
    """The job failed; `category` tells who caused it."""

    def __init__(
        self,
        message: str,
        request_id: str = "",
        category: RequestErrorCategory = RequestErrorCategory.Unknown,
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.category = category
        self.verdict = classify_failure(None, category)


class ExperimentalWarning(FutureWarning):
    """This part of the API may change without notice."""


ERROR_BY_STATUS: dict[int, type[APIStatusError]] = {
    cls.status_code: cls for cls in APIStatusError.__subclasses__() if cls.status_code < 500
}


def error_class_for(status: int) -> type[APIStatusError]:
    """Return the exception class of an HTTP status."""
    if status >= 500:
        return InternalServerError
    return ERROR_BY_STATUS.get(status, APIStatusError)
