"""The exception hierarchy, the classification of failures, and pickling."""

from __future__ import annotations

import copy
import itertools
import pickle
import traceback
from types import SimpleNamespace
from typing import Any

import pytest

from tinkex import errors
from tinkex.client.http import HttpRequest, HttpResponse
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BillingError,
    CheckpointError,
    ClientClosed,
    ConfigError,
    DownloadError,
    FailureClass,
    InternalServerError,
    InvalidInput,
    PromiseExpiredError,
    RateLimitError,
    RequestErrorCategory,
    RequestFailedError,
    ResultTimeoutError,
    TinkexError,
    WrongThread,
    classify_failure,
    error_class_for,
)

#: Every status that anything in the protocol, or a proxy on the way, gives a meaning to.
STATUSES = [*range(400, 432), 449, 451, 460, 499, *range(500, 512), *range(520, 531), 598, 599]
CATEGORIES = [None, *RequestErrorCategory]
HEADERS = [None, True, False]


def truth(
    status: int | None, category: RequestErrorCategory | None, should_retry: bool | None
) -> FailureClass:
    """Return the expected classification from the protocol's table; the first match wins."""
    is_4xx = status is not None and 400 <= status < 500
    blamed_by_status = is_4xx and status not in {408, 409, 410, 429}
    rows = [
        (should_retry is True, FailureClass(False, True)),
        (should_retry is False, FailureClass(blamed_by_status, False)),
        (category == "user", FailureClass(True, False)),
        (category in {"server", "unknown"}, FailureClass(False, True)),
        (status == 408, FailureClass(False, True)),
        (status == 429, FailureClass(False, True)),
        (status == 409, FailureClass(False, True)),
        (status == 410, FailureClass(False, False)),
        (is_4xx, FailureClass(True, False)),
        (status is not None and status >= 500, FailureClass(False, True)),
        (status is None, FailureClass(False, True)),
    ]
    return next(verdict for is_match, verdict in rows if is_match)


def answer(status: int, body: bytes = b"{}") -> HttpResponse:
    return HttpResponse(status, {}, body, HttpRequest("POST", "http://host/api/v1/optim_step"))


def status_error(status: int, **options: Any) -> APIStatusError:
    return error_class_for(status)(f"Error code: {status}", answer(status), {"a": 1}, **options)


def test_classification_follows_the_table() -> None:
    rows = list(itertools.product([None, *STATUSES], CATEGORIES, HEADERS))
    assert len(rows) > 600
    wrong = [row for row in rows if classify_failure(*row) != truth(*row)]
    assert wrong == []


@pytest.mark.parametrize("status", STATUSES)
def test_errors_carry_their_classification(status: int) -> None:
    for category, header in itertools.product(CATEGORIES, HEADERS):
        error = status_error(status, category=category, should_retry=header)
        expected = truth(status, category, header)
        assert error.verdict == expected
        assert (error.is_user_error, error.retryable) == tuple(expected)
        assert error.status == error.status_code == status
        # The category of the server is kept; without one it follows from the classification.
        blamed = "user" if expected.is_user_error else "server"
        assert error.category is (category or RequestErrorCategory(blamed))
        # Callers must know whether the header forbade or allowed the retry.
        assert error.should_retry is header


def test_unexpected_status_is_final_and_not_a_user_error() -> None:
    for status in (100, 204, 302, 304, 399):
        assert classify_failure(status) == FailureClass(is_user_error=False, is_retryable=False)


@pytest.mark.parametrize("category", list(RequestErrorCategory))
def test_failed_request_is_classified_by_category(category: RequestErrorCategory) -> None:
    error = RequestFailedError("out of memory", "req-1", category)
    assert error.verdict == truth(None, category, None)
    assert error.is_user_error is (category is RequestErrorCategory.User)
    assert (error.request_id, error.category, error.message) == ("req-1", category, "out of memory")


def test_failures_without_response_are_retryable() -> None:
    for error in (APIConnectionError(), APITimeoutError()):
        assert error.verdict == classify_failure(None) == FailureClass(False, True)
        assert error.category is RequestErrorCategory.Server
        assert error.status is None


def test_invalid_response_is_not_a_user_error() -> None:
    error = APIResponseValidationError(answer(200), "<html>")
    assert error.verdict == FailureClass(is_user_error=False, is_retryable=False)
    assert error.category is RequestErrorCategory.Server
    assert (error.status_code, error.body) == (200, "<html>")
    assert "expected schema" in str(error)


def test_local_validation_errors_are_user_errors() -> None:
    for cls in (ConfigError, InvalidInput, ClientClosed):
        assert cls("x").verdict == FailureClass(is_user_error=True, is_retryable=False)
        assert cls("x").category is RequestErrorCategory.User
    assert issubclass(ConfigError, ValueError)
    assert issubclass(InvalidInput, ValueError)
    assert issubclass(ClientClosed, RuntimeError)
    assert issubclass(APITimeoutError, TimeoutError)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("user", RequestErrorCategory.User),
        ("USER", RequestErrorCategory.User),
        ("Server", RequestErrorCategory.Server),
        ("unknown", RequestErrorCategory.Unknown),
        ("internal", RequestErrorCategory.Unknown),
        ("", RequestErrorCategory.Unknown),
        (None, RequestErrorCategory.Unknown),
        (7, RequestErrorCategory.Unknown),
        (RequestErrorCategory.User, RequestErrorCategory.User),
    ],
)
def test_categories_are_parsed_case_insensitively(
    text: object, expected: RequestErrorCategory
) -> None:
    assert RequestErrorCategory.parse(text) is expected


def test_categories_are_lower_case_on_the_wire() -> None:
    assert [str(category) for category in RequestErrorCategory] == ["unknown", "server", "user"]


def test_every_status_has_its_class() -> None:
    named = {
        400: "BadRequestError",
        401: "AuthenticationError",
        402: "BillingError",
        403: "PermissionDeniedError",
        404: "NotFoundError",
        409: "ConflictError",
        410: "PromiseExpiredError",
        422: "UnprocessableEntityError",
        429: "RateLimitError",
    }
    for status in STATUSES:
        fallback = "InternalServerError" if status >= 500 else "APIStatusError"
        cls = error_class_for(status)
        assert cls.__name__ == named.get(status, fallback)
        assert cls("x", answer(status)).status_code == status


# --- names --------------------------------------------------------------------------------

OFFICIAL_NAMES = [
    "APIConnectionError",
    "APIError",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "ConflictError",
    "ExperimentalWarning",
    "InternalServerError",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestFailedError",
    "TinkerError",
    "UnprocessableEntityError",
]


@pytest.mark.parametrize("name", OFFICIAL_NAMES)
def test_official_names_exist_in_the_hierarchy(name: str) -> None:
    cls = getattr(errors, name)
    is_warning = name == "ExperimentalWarning"
    assert issubclass(cls, FutureWarning if is_warning else errors.TinkerError)


def test_hierarchy_matches_the_official_package() -> None:
    assert errors.TinkerError is TinkexError
    assert issubclass(APITimeoutError, APIConnectionError)
    assert issubclass(APIConnectionError, APIError)
    assert issubclass(APIStatusError, APIError)
    assert issubclass(APIResponseValidationError, APIError)
    assert not issubclass(RequestFailedError, APIError)


def test_official_constructors_work() -> None:
    response = SimpleNamespace(status_code=404, request="the request")
    error = errors.NotFoundError("gone", response=response, body=None)
    assert (error.message, error.request, error.response) == ("gone", "the request", response)
    assert str(APIConnectionError(request=None)) == "Connection error."
    assert str(APIConnectionError(None, "refused")) == "refused"
    assert str(APITimeoutError(request=None)) == "Request timed out."
    failed = RequestFailedError(message="m", request_id="r", category=RequestErrorCategory.User)
    assert str(failed) == "m"


def test_docstring_is_the_default_message() -> None:
    assert str(ClientClosed()) == "The client is closed."
    assert str(errors.NotFoundError()).startswith("HTTP 404")
    assert ConfigError("no key").message == "no key"


# --- hints --------------------------------------------------------------------------------


def every_class(root: type[TinkexError] = TinkexError) -> list[type[TinkexError]]:
    below = [every_class(cls) for cls in root.__subclasses__() if cls.__module__ == errors.__name__]
    return [root, *itertools.chain.from_iterable(below)]


HINTS = {
    AuthenticationError: "TINKER_API_KEY",
    BillingError: "billing",
    ClientClosed: "new ServiceClient",
    DownloadError: "again",
    CheckpointError: "another checkpoint",
    InternalServerError: "The server failed",
    PromiseExpiredError: "again",
    RateLimitError: "concurrent",
    ResultTimeoutError: "poll_timeout_seconds",
    WrongThread: "callback",
}


def made(cls: type[TinkexError]) -> TinkexError:
    if issubclass(cls, APIStatusError):
        return cls(
            "what happened",
            answer(cls.status_code),
            {"error": "what happened"},
            category=RequestErrorCategory.User,
            should_retry=False,
            retry_after_seconds=2.5,
        )
    if issubclass(cls, APIResponseValidationError):
        return cls(answer(200), "body", "what happened")
    if issubclass(cls, APIConnectionError):
        return cls(HttpRequest("GET", "http://host/"), "what happened", hint="look")
    if issubclass(cls, RequestFailedError):
        return cls("what happened", "req-9", RequestErrorCategory.User)
    return cls("what happened")


@pytest.mark.parametrize("cls", every_class(), ids=lambda cls: cls.__name__)
def test_error_classes_have_their_hints(cls: type[TinkexError]) -> None:
    error = cls("x") if cls is RequestFailedError else cls()
    if cls in HINTS:
        assert error.hint is not None
        assert HINTS[cls] in error.hint
    else:
        assert error.hint is None


def test_hint_is_per_instance() -> None:
    assert ConfigError("x", hint="look there").hint == "look there"
    assert ConfigError("x").hint is None
    assert ClientClosed("x", hint="own").hint == "own"
    assert APITimeoutError(None, "slow", hint="wait").hint == "wait"


# --- pickles ------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", every_class(), ids=lambda cls: cls.__name__)
def test_pickle_preserves_all_attributes(cls: type[TinkexError]) -> None:
    error = made(cls)
    error.hint = "a hint of its own"
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is cls
        assert str(again) == str(error) == "what happened"
        assert again.args == error.args
        for name in ("message", "status", "hint", "verdict", "category"):
            assert getattr(again, name) == getattr(error, name), name
        assert again.__dict__ == error.__dict__
        assert (again.is_user_error, again.retryable) == (error.is_user_error, error.retryable)


def test_every_class_is_covered() -> None:
    defined = {cls for cls in vars(errors).values() if isinstance(cls, type)}
    expected = {cls for cls in defined if issubclass(cls, TinkexError)}
    assert set(every_class()) == expected
    assert len(expected) > 20


def test_user_subclass_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(Odd("a", "b")))
    assert (type(error), error.pair, str(error)) == (Odd, ("a", "b"), "a and b")


class Odd(InvalidInput):
    """An exception class with another constructor."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} and {right}")
        self.pair = (left, right)


def test_hint_is_printed_below_the_message() -> None:
    error = ConfigError("no key", hint="Set TINKER_API_KEY.")
    printed = "".join(traceback.format_exception(error))
    assert printed.splitlines()[-2:] == ["tinkex.errors.ConfigError: no key", error.hint]
    assert str(error) == "no key"
    assert "None" not in "".join(traceback.format_exception(ConfigError("no key")))
