"""Bodies of OpenAI's chat completions and completions, and the fields that both have."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal

import msgspec

from tinkex.server.inference.chat_request import SamplingSettings
from tinkex.server.inference.error_bodies import invalid_value, unsupported_value

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_STOP_TOKENS = 64
MAX_TOP_LOGPROBS = 20
MAX_INT64 = 2**63 - 1
MAX_TOKEN = 2**31 - 1
MAX_USER_CHARS = 256


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a streamed response."""

    include_usage: bool | None = None


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both endpoints; unknown ones are ignored."""

    model: str
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class ChatCompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """The body of chat completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """The body of completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


#: Fields whose neutral values are accepted until the sampler has them.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "min_p": (None, 0.0),
}


def parse_sampling(
    request: OpenAIRequest,
    max_tokens: int | None,
    num_top_logprobs: int | None,
    logprobs_field: str = "top_logprobs",
) -> SamplingSettings:
    """Return the sampling settings; `num_top_logprobs` is None without log-probabilities."""
    _check_unsupported(request)
    if request.stream_options is not None and not request.stream:
        raise invalid_value("stream_options", "stream_options needs stream to be true")
    if num_top_logprobs is not None:
        _check_range(logprobs_field, num_top_logprobs, 0, MAX_TOP_LOGPROBS)
    return SamplingSettings(
        max_tokens=max_tokens,
        temperature=_check_number("temperature", request.temperature, 0.0, 2.0),
        top_p=_parse_top_p(request.top_p),
        top_k=_parse_top_k(request.top_k),
        seed=_parse_seed(request.seed),
        stop=_parse_stop(request.stop),
        stop_token_ids=_parse_stop_tokens(request.stop_token_ids),
        ignores_eos=bool(request.ignore_eos),
        num_choices=_check_range("n", 1 if request.n is None else request.n, 1, MAX_CHOICES),
        has_logprobs=num_top_logprobs is not None,
        num_top_logprobs=num_top_logprobs or 0,
    )


def parse_user(request: OpenAIRequest, other: str | None = None) -> str | None:
    """Return the end user for the audit log."""
    user = request.user or other
    return user[:MAX_USER_CHARS] if user else None


def _check_unsupported(request: OpenAIRequest) -> None:
    for name, neutral in _NEUTRAL_VALUES.items():
        value = getattr(request, name)
        if value not in neutral:
            raise unsupported_value(
                name, f"{name} is not supported by this server; leave it out or send {neutral[1]:g}"
            )
    if any(request.logit_bias.values() if request.logit_bias else ()):
        raise unsupported_value(
            "logit_bias", "logit_bias is not supported by this server; leave it out"
        )


def _check_number(name: str, value: float | None, low: float, high: float) -> float:
    number = 1.0 if value is None else value
    if not isfinite(number) or not low <= number <= high:
        raise invalid_value(name, f"{name} is {number:g}; expected {low:g} to {high:g}")
    return number


def _check_range(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise invalid_value(name, f"{name} is {value!r:.40}; expected {low} to {high}")
    return value


def _parse_top_p(top_p: float | None) -> float:
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise invalid_value("top_p", f"top_p is {top_p:g}; expected more than 0, and at most 1")
    return 1.0 if top_p is None else top_p


def _parse_top_k(top_k: int | None) -> int:
    # vLLM takes 0 for no limit, too.
    if top_k in {None, -1, 0}:
        return -1
    assert top_k is not None
    return _check_range("top_k", top_k, 1, MAX_TOKEN)


def _parse_seed(seed: int | None) -> int | None:
    return None if seed is None else _check_range("seed", seed, -MAX_INT64 - 1, MAX_INT64)


def _parse_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise invalid_value("stop", f"stop has {len(stops)} texts; expected at most {MAX_STOPS}")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise invalid_value(
                "stop",
                f"a stop text has {len(text)} characters; expected 1 to {MAX_STOP_CHARS}",
            )
    return stops


def _parse_stop_tokens(tokens: list[int] | None) -> tuple[int, ...]:
    if tokens and len(tokens) > MAX_STOP_TOKENS:
        raise invalid_value(
            "stop_token_ids",
            f"stop_token_ids has {len(tokens)} ids; expected at most {MAX_STOP_TOKENS}",
        )
    return tuple(_check_range("stop_token_ids", token, 0, MAX_TOKEN) for token in tokens or ())


def parse_max_tokens(name: str, value: int | None, minimum: int = 1) -> int | None:
    """Return the maximum number of tokens; None means what the context leaves."""
    if value is not None and value < minimum:
        raise invalid_value(name, f"{name} is {value!r:.40}; expected {minimum} or more")
    return value
