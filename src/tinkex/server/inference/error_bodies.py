"""Errors of the inference endpoints, in the bodies of both API families."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from tinkex.errors import APIStatusError
from tinkex.server.http.error_responses import (
    HANDLED_ERRORS,
    internal_error_response,
    response_for_error,
)
from tinkex.server.http.request_context import RawResponse


class ApiFamily(StrEnum):
    """Whose API a path belongs to; decides the form of errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class InferenceError(APIStatusError):
    """A refused inference request, with the field that caused it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        self.status_code = status
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.param = param
        self.code = code


class MethodNotAllowed(InferenceError):
    """HTTP 405: the path has other methods."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message, status=405)
        self.allowed = allowed


def invalid_value(param: str, message: str) -> InferenceError:
    """The error for a field with a wrong value."""
    return InferenceError(message, param=param)


def unsupported_value(param: str, message: str) -> InferenceError:
    """The error for a field that this server knows but does not honour."""
    return InferenceError(message, param=param, code="unsupported_value")


def model_not_found(name: str) -> InferenceError:
    """The error for a model that does not exist, or that the caller cannot read."""
    return InferenceError(
        f"The model {name!r:.300} does not exist or you do not have access to it; GET /v1/models "
        "lists the names",
        status=404,
        param="model",
        code="model_not_found",
    )


def context_exceeded(
    num_tokens: int, max_context_tokens: int, param: str = "messages"
) -> InferenceError:
    """The error for a prompt that leaves no space for an answer."""
    # litellm recognises this error by "This model's maximum context length is", LangChain and
    # coding agents by "prompt is too long".
    return InferenceError(
        f"This model's maximum context length is {max_context_tokens} tokens. However, the "
        f"prompt is too long: it has at least {num_tokens} tokens. Send a shorter prompt.",
        param=param,
        code="context_length_exceeded",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What an error response says, independent of the API family."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


_CODES = {
    401: "invalid_api_key",
    404: "model_not_found",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "overloaded",
    504: "timeout",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: The end of msgspec's messages, which names the field.
_FIELD = re.compile(r" - at `\$\.([^`]+)`$")


def describe_failure(error: BaseException, operation: str = "inference") -> Failure:
    """Return the failure of any exception; unexpected ones are logged with an incident id."""
    from_error = _find_response(error, operation)
    # 422 of the training API is 400 in both families.
    status = 400 if from_error.status == 422 else from_error.status
    message: str = msgspec.json.decode(from_error.body)["error"]
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    if isinstance(error, msgspec.ValidationError) and (found := _FIELD.search(str(error))):
        param = found[1]
    headers = dict(from_error.headers)
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allowed
    return Failure(
        status=status,
        message=message,
        param=param,
        code=code or _CODES.get(status),
        headers=headers,
    )


def _find_response(error: BaseException, operation: str) -> RawResponse:
    if isinstance(error, HANDLED_ERRORS):
        return response_for_error(error)
    return internal_error_response(error, operation)


def error_body(family: ApiFamily, failure: Failure, request_id: str) -> dict[str, object]:
    """Return the JSON body of a failure."""
    if family is ApiFamily.ANTHROPIC:
        error = {"type": _anthropic_type(failure.status), "message": failure.message}
        return {"type": "error", "error": error, "request_id": request_id}
    return {
        "error": {
            "message": _openai_message(failure),
            "type": _openai_type(failure.status),
            "param": failure.param,
            "code": failure.code,
        }
    }


def failure_response(family: ApiFamily, failure: Failure, request_id: str) -> RawResponse:
    """Return the response of a failure."""
    is_overloaded = family is ApiFamily.ANTHROPIC and failure.status == 503
    return RawResponse(
        status=529 if is_overloaded else failure.status,
        body=msgspec.json.encode(error_body(family, failure, request_id)),
        headers=failure.headers,
    )


def _openai_message(failure: Failure) -> str:
    # litellm tells a wrong key from other invalid requests by these words of OpenAI.
    is_key = failure.status == 401
    return f"Incorrect API key provided: {failure.message}" if is_key else failure.message


def _openai_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _anthropic_type(status: int) -> str:
    default = "api_error" if status >= 500 else "invalid_request_error"
    return _ANTHROPIC_TYPES.get(status, default)
