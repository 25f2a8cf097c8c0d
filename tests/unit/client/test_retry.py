"""Retry decisions and waits."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.client.retry import (
    MAX_RETRY_AFTER_SECONDS,
    NO_RETRY,
    RetryPolicy,
    backoff,
    is_unreachable,
    parse_retry_after,
    parse_should_retry,
    wait_before_retry,
)
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    ConfigError,
    InvalidInput,
    RequestErrorCategory,
    RequestFailedError,
    TinkexError,
    error_class_for,
)

quick = settings(max_examples=80, deadline=None, derandomize=True)
POLICY = RetryPolicy()
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Answer:
    def __init__(self, status: int) -> None:
        self.status_code = status


def refused(status: int, **options: Any) -> APIStatusError:
    return error_class_for(status)(f"Error code: {status}", Answer(status), None, **options)


def wait(
    error: TinkexError,
    policy: RetryPolicy = POLICY,
    attempt: int = 1,
    elapsed: float = 0.0,
    jitter: float = 1.0,
) -> float | None:
    return wait_before_retry(policy, attempt, elapsed, error, jitter)


# --- what is retried ----------------------------------------------------------------------


def test_status_retries_follow_classification() -> None:
    retried = {status for status in range(400, 600) if wait(refused(status)) is not None}
    assert retried == {408, 409, 429, *range(500, 600)}


@pytest.mark.parametrize("status", [400, 401, 404, 408, 409, 410, 429, 500, 503])
def test_should_retry_header_overrides_status(status: int) -> None:
    assert wait(refused(status, should_retry=True)) is not None
    assert wait(refused(status, should_retry=False)) is None


@pytest.mark.parametrize("status", [400, 500, 503])
def test_category_overrides_status(status: int) -> None:
    assert wait(refused(status, category=RequestErrorCategory.User)) is None
    assert wait(refused(status, category=RequestErrorCategory.Server)) is not None


def test_conflict_is_retried_only_if_policy_allows() -> None:
    final = RetryPolicy(retries_conflict=False)
    assert wait(refused(409)) is not None
    assert wait(refused(409), final) is None
    # Unless the server asks for a retry.
    assert wait(refused(409, should_retry=True), final) is not None
    assert wait(refused(429), final) is not None


@pytest.mark.parametrize(
    "error",
    [ConfigError("x"), InvalidInput("x"), APIResponseValidationError(None, None), TinkexError("x")],
)
def test_final_errors_are_not_retried(error: TinkexError) -> None:
    assert wait(error) is None


# --- attempts -----------------------------------------------------------------------------


def test_rejections_are_limited_by_count() -> None:
    policy = RetryPolicy(max_retries=3, outage_seconds=1.0)
    waits = [wait(refused(500), policy, attempt, elapsed=999.0) for attempt in range(1, 6)]
    assert [value is not None for value in waits] == [True, True, True, False, False]


def test_outages_are_limited_by_time() -> None:
    policy = RetryPolicy(max_retries=1, outage_seconds=100.0)
    for error in (APIConnectionError(), APITimeoutError(), *map(refused, (502, 503, 504))):
        assert wait(error, policy, attempt=500, elapsed=90.0) == 10.0
        assert wait(error, policy, attempt=500, elapsed=90.1) is None


def test_server_error_before_contact_counts_as_outage() -> None:
    # A 5xx counts as an outage too: a wrong address is reported soon.
    first = RetryPolicy(max_retries=10, outage_seconds=4.0, has_contact=False)
    for error in (APIConnectionError(), refused(500), refused(503)):
        assert wait(error, first, attempt=1, elapsed=0.0) is not None
        assert wait(error, first, attempt=4, elapsed=3.0) is None
    # A 429 is a response: that server exists.
    assert wait(refused(429), first, attempt=9, elapsed=50.0) is not None


def test_no_retry_policy_retries_no_error() -> None:
    for error in (APIConnectionError(), APITimeoutError(), refused(503), refused(429)):
        assert wait(error, NO_RETRY) is None
    assert wait(refused(429, should_retry=True), NO_RETRY) is None


def test_zero_outage_time_allows_no_retry() -> None:
    # The policy decides only about attempts after a failure.
    assert wait(APIConnectionError(), RetryPolicy(outage_seconds=0.0)) is None
    assert wait(APIConnectionError(), attempt=0) is not None
    assert wait(refused(500), RetryPolicy(max_retries=0), attempt=0) is not None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (APIConnectionError(), True),
        (APITimeoutError(), True),
        (refused(502), True),
        (refused(503), True),
        (refused(504), True),
        (refused(500), False),
        (refused(429), False),
        (RequestFailedError("x"), False),
        (ConfigError("x"), False),
    ],
)
def test_is_unreachable(error: TinkexError, expected: bool) -> None:
    assert is_unreachable(error) is expected


# --- waits --------------------------------------------------------------------------------


def test_waits_double_up_to_limit() -> None:
    waits = [backoff(POLICY, attempt, jitter=1.0) for attempt in range(1, 9)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]


@quick
@given(st.integers(0, 100_000), st.floats(0.0, 1.0, exclude_max=True))
def test_jitter_reduces_wait_by_at_most_a_quarter(attempt: int, jitter: float) -> None:
    full = backoff(POLICY, attempt, jitter=1.0)
    assert 0.75 * full <= backoff(POLICY, attempt, jitter) <= full <= 10.0


@quick
@given(
    st.integers(0, 1000),
    st.floats(0.0, 1e6),
    st.floats(0.0, 1.0, exclude_max=True),
    st.sampled_from([None, 0.001, 3.0, 60.0]),
    st.sampled_from([408, 409, 429, 500, 502, 503]),
    st.booleans(),
)
def test_wait_is_at_least_retry_after(
    attempt: int,
    elapsed: float,
    jitter: float,
    retry_after: float | None,
    status: int,
    contact: bool,
) -> None:
    policy = RetryPolicy(has_contact=contact)
    seconds = wait(
        refused(status, retry_after_seconds=retry_after), policy, attempt, elapsed, jitter
    )
    assert seconds is None or seconds >= max(retry_after or 0.0, 0.09)


def test_longer_of_backoff_and_retry_after_is_used() -> None:
    assert wait(refused(429, retry_after_seconds=7.0)) == 7.0
    assert wait(refused(429, retry_after_seconds=0.1), attempt=4) == 4.0


def test_retry_after_beyond_outage_time_gives_up() -> None:
    policy = RetryPolicy(outage_seconds=20.0)
    assert wait(refused(503, retry_after_seconds=15.0), policy, elapsed=4.0) == 15.0
    assert wait(refused(503, retry_after_seconds=15.0), policy, elapsed=6.0) is None


def test_policy_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        POLICY.max_retries = 3  # type: ignore[misc]


# --- headers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "0.5"}, 0.0005),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after-ms": "", "retry-after": "9"}, 9.0),
        ({"retry-after": "60"}, 60.0),
        ({"retry-after": "60.1"}, None),
        ({"retry-after": "3600"}, None),
        ({"retry-after-ms": "60001"}, None),
        ({"retry-after": "0"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "1e400"}, None),
        ({"retry-after": "later"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"}, None),
        ({"retry-after": "Mon, 01 Jan 2024 00:00:00 +99999999999999"}, None),
    ],
)
def test_parse_retry_after(headers: dict[str, str], expected: float | None) -> None:
    assert parse_retry_after(headers, NOW) == expected


@pytest.mark.parametrize(
    ("ahead", "expected"), [(30, 30.0), (60, 60.0), (61, None), (0, None), (-10, None)]
)
def test_parse_retry_after_date(ahead: int, expected: float | None) -> None:
    then = NOW + timedelta(seconds=ahead)
    assert parse_retry_after({"retry-after": format_datetime(then, usegmt=True)}, NOW) == expected
    # The same time in another zone, and without a zone.
    text = then.strftime("%a, %d %b %Y %H:%M:%S ")
    assert parse_retry_after({"retry-after": text + "-0000"}, NOW) == expected


def test_retry_after_date_uses_real_clock_by_default() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    seconds = parse_retry_after({"retry-after": soon})
    assert seconds is not None
    assert 25.0 < seconds <= 30.0


@pytest.mark.parametrize("skew_hours", [-2, 28])
def test_retry_after_date_is_relative_to_server_date(skew_hours: int) -> None:
    theirs = datetime.now(UTC) + timedelta(hours=skew_hours)
    headers = {
        "date": format_datetime(theirs, usegmt=True),
        "retry-after": format_datetime(theirs + timedelta(seconds=30), usegmt=True),
    }
    assert parse_retry_after(headers) == 30.0


@quick
@given(st.text(max_size=40), st.text(max_size=20))
def test_parse_retry_after_never_raises(after: str, millis: str) -> None:
    seconds = parse_retry_after({"retry-after": after, "retry-after-ms": millis}, NOW)
    assert seconds is None or 0.0 < seconds <= MAX_RETRY_AFTER_SECONDS


@pytest.mark.parametrize(
    ("text", "expected"),
    [("true", True), ("True", True), ("false", False), ("FALSE", False), ("", None), ("1", None)],
)
def test_parse_should_retry(text: str, expected: bool | None) -> None:
    assert parse_should_retry({"x-should-retry": text}) is expected
    assert parse_should_retry({}) is None
