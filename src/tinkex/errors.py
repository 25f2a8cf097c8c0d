"""Everything that can go wrong, as one tree; and one function that judges it.

TinkexError                         also exported as TinkerError
├── ConfigError                     a setting is missing or wrong
├── InvalidInput                    refused before anything was sent
├── ClientClosed                    the client was closed while work was waiting
├── WrongThread                     a blocking call where nothing may block
├── DownloadError                   a file arrived short, changed or unsafe
├── CheckpointError                 saved files are missing or damaged
├── StoreError                      the server's database cannot be used now  (retryable)
│   └── StoreBusy, StoreFull, StoreUnavailable
├── APIError
│   ├── APIConnectionError          no answer arrived                        (retryable)
│   │   └── APITimeoutError         ConnectTimeoutError, ResultTimeoutError
│   ├── APIResponseValidationError  an answer arrived and makes no sense
│   └── APIStatusError              the server answered, and it was a no
│       ├── BadRequestError 400, AuthenticationError 401, BillingError 402,
│       │   PermissionDeniedError 403, NotFoundError 404, UnprocessableEntityError 422
│       ├── ConflictError 409, PromiseExpiredError 410
│       ├── RateLimitError 429                                               (retryable)
│       └── InternalServerError 5xx                                          (retryable)
└── RequestFailedError              the work ran and failed; .category says whose fault
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import Any, ClassVar, NamedTuple


class RequestErrorCategory(StrEnum):
    """Whose fault a failure is."""

    Unknown = auto()  #: nobody said
    Server = auto()  #: the service's; the same request may work later
    User = auto()  #: the request's; the same request will fail again

    @classmethod
    def parse(cls, text: object) -> RequestErrorCategory:
        """Read a category from the wire, whatever its case; anything else is Unknown."""
        return cls(str(text))

    @classmethod
    def _missing_(cls, value: object) -> RequestErrorCategory:
        lowered = str(value).lower()
        return next((member for member in cls if member.value == lowered), cls.Unknown)


class FailureClass(NamedTuple):
    """What a failure means for the caller."""

    is_user_error: bool
    is_retryable: bool


#: Client errors that are not the user's fault.
NOT_USER_ERROR_STATUSES = frozenset({408, 409, 410, 429})
#: Client errors that may pass if tried again. 410 is absent: a promise that is gone stays gone.
RETRYABLE_STATUSES = frozenset({408, 409, 429})


def classify_failure(
    status: int | None,
    category: RequestErrorCategory | None = None,
    should_retry: bool | None = None,
) -> FailureClass:
    """Judge a failure by header, then category, then status: the only place that does.

    `should_retry` is the server's `x-should-retry`; `status` None means no answer arrived.
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
    """Base of every error this package raises on purpose."""

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
        """What Python prints below the message: what to do next."""
        return [self.hint] if self.hint else []

    @property
    def is_user_error(self) -> bool:
        """True when trying again without a change cannot help."""
        return self.verdict.is_user_error

    @property
    def retryable(self) -> bool:
        """True when the same request may succeed later."""
        return self.verdict.is_retryable

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _rebuild(
    cls: type[TinkexError], args: tuple[object, ...], state: dict[str, object]
) -> TinkexError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


#: The official package calls the root TinkerError.
TinkerError = TinkexError

_USER_ERROR = FailureClass(is_user_error=True, is_retryable=False)


class ConfigError(TinkexError, ValueError):
    """A setting is missing or wrong."""

    category = RequestErrorCategory.User
    verdict = _USER_ERROR


class InvalidInput(TinkexError, ValueError):
    """The input was refused before anything was sent."""

    category = RequestErrorCategory.User
    verdict = _USER_ERROR


class ClientClosed(TinkexError, RuntimeError):
    """The client is closed."""

    category = RequestErrorCategory.User
    verdict = _USER_ERROR
    hint = "Create a new ServiceClient; a closed one cannot be used again."


class WrongThread(TinkexError, RuntimeError):
    """A blocking call was made on an I/O thread, which would wait for itself."""

    category = RequestErrorCategory.User
    verdict = _USER_ERROR
    hint = (
        "In a callback, use the future's value only when it is done, or await on a loop of yours."
    )


class StoreError(TinkexError):
    """The server's database cannot be used now."""

    category = RequestErrorCategory.Server
    verdict = FailureClass(is_user_error=False, is_retryable=True)


class StoreBusy(StoreError):
    """Somebody else writes to the database for too long."""


class StoreFull(StoreError):
    """The disk of the server is full."""


class StoreUnavailable(StoreError):
    """The database does not answer."""


class DownloadError(TinkexError):
    """A download arrived short, changed or unsafe."""

    hint = "Run the download again: complete parts are kept and it goes on where it stopped."


class CheckpointError(TinkexError):
    """Saved files are missing or damaged."""

    category = RequestErrorCategory.Server
    hint = "Use another checkpoint; these files are not what was written."


class APIError(TinkexError):
    """Something went wrong between this client and the server."""

    is_web_page: bool = False
    """Whether the answer was HTML: the address is not that of a Tinker server."""

    def __init__(
        self,
        message: str = "",
        request: Any = None,
        *,
        body: object | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.request = request
        self.body = body


class APIConnectionError(APIError):
    """No answer arrived; the request may or may not have reached the server."""

    verdict = classify_failure(None)
    category = RequestErrorCategory.Server

    def __init__(
        self,
        request: Any = None,
        message: str = "Connection error.",
        *,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, request, hint=hint)


class APITimeoutError(APIConnectionError, TimeoutError):
    """The server did not answer in time."""

    def __init__(
        self, request: Any = None, message: str = "Request timed out.", *, hint: str | None = None
    ) -> None:
        super().__init__(request, message, hint=hint)


class ConnectTimeoutError(APITimeoutError):
    """The server did not accept a connection in time."""


class ResultTimeoutError(APITimeoutError):
    """The work did not end within poll_timeout_seconds; it may still end on the server."""

    verdict = FailureClass(is_user_error=False, is_retryable=False)
    hint = "Raise poll_timeout_seconds, or set it to None to wait for ever."


class APIResponseValidationError(APIError):
    """The server's answer does not fit the protocol."""

    category = RequestErrorCategory.Server

    def __init__(
        self, response: Any = None, body: object | None = None, message: str | None = None
    ) -> None:
        text = message or "Data returned by API invalid for expected schema."
        super().__init__(text, getattr(response, "request", None), body=body)
        self.response = response
        self.status_code: int | None = getattr(response, "status_code", None)


class APIStatusError(APIError):
    """The server answered, and it was a no."""

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
    """HTTP 403: this credential may not do that."""

    status_code = 403


class NotFoundError(APIStatusError):
    """HTTP 404: there is no such thing, or it belongs to somebody else."""

    status_code = 404


class ConflictError(APIStatusError):
    """HTTP 409: the resource is in another state already."""

    status_code = 409


class PromiseExpiredError(APIStatusError):
    """HTTP 410: the result is gone; the work must be submitted again."""

    status_code = 410
    default_hint = "Submit the operation again."


class UnprocessableEntityError(APIStatusError):
    """HTTP 422: the request was well-formed but makes no sense."""

    status_code = 422


class RateLimitError(APIStatusError):
    """HTTP 429: too many requests."""

    status_code = 429
    default_hint = "Slow down, or lower the number of concurrent requests."


class InternalServerError(APIStatusError):
    """HTTP 5xx: the server failed."""

    status_code = 500
    default_hint = "This is the server's fault; try again later."


class RequestFailedError(TinkexError):
    """The work ran and failed; `category` says whose fault it was."""

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
    """The class that stands for an HTTP status."""
    if status >= 500:
        return InternalServerError
    return ERROR_BY_STATUS.get(status, APIStatusError)
