"""When a sample is resubmitted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.client.retry import (
    MAX_FAILED_RUNS,
    RetryConfig,
    is_worth_retrying,
    wait_before_resubmit,
)
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    ConfigError,
    InvalidInput,
    PromiseExpiredError,
    RequestErrorCategory,
    RequestFailedError,
    TinkexError,
    error_class_for,
)


class Answer:
    def __init__(self, status: int) -> None:
        self.status_code = status


def refused(status: int, **options: Any) -> APIStatusError:
    return error_class_for(status)(f"Error code: {status}", Answer(status), None, **options)


def failed(category: RequestErrorCategory) -> RequestFailedError:
    return RequestFailedError("boom", "r", category)


def wait(
    error: TinkexError,
    config: RetryConfig | None = None,
    attempt: int = 1,
    stuck: float = 0.0,
    jitter: float = 0.5,
) -> float | None:
    return wait_before_resubmit(config or RetryConfig(), error, attempt, stuck, 10, jitter)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (refused(408), True),
        (refused(409), True),
        (refused(410), True),
        (refused(429), True),
        (refused(500), True),
        (refused(503), True),
        (APIConnectionError(), True),
        (APITimeoutError(), True),
        (failed(RequestErrorCategory.Server), True),
        (failed(RequestErrorCategory.Unknown), True),
        (failed(RequestErrorCategory.User), False),
        (refused(400), False),
        (refused(401), False),
        (refused(402), False),
        (refused(404), False),
        (refused(422), False),
        (InvalidInput("x"), False),
        (ConfigError("x"), False),
        (APIResponseValidationError(None, None), False),
    ],
    ids=lambda value: getattr(value, "message", str(value)),
)
def test_which_errors_are_resubmitted(error: TinkexError, expected: bool) -> None:
    assert is_worth_retrying(RetryConfig(), error) is expected
    assert (wait(error) is not None) is expected


@pytest.mark.parametrize("status", [408, 410, 429, 500, 503])
def test_should_retry_false_prevents_resubmission(status: int) -> None:
    assert wait(refused(status, should_retry=False)) is None


def test_should_retry_true_allows_resubmission() -> None:
    assert wait(refused(400, should_retry=True)) is not None


def test_retryable_exceptions_can_be_extended() -> None:
    config = RetryConfig(retryable_exceptions=(APIResponseValidationError,))
    assert wait(APIResponseValidationError(None, None), config) is not None
    assert wait(PromiseExpiredError("x", Answer(410)), config) is None


def test_retry_logic_can_be_disabled() -> None:
    config = RetryConfig(enable_retry_logic=False)
    for error in (refused(429), refused(503), refused(410), APIConnectionError()):
        assert wait(error, config) is None


def test_failing_request_is_limited_by_count() -> None:
    server = failed(RequestErrorCategory.Server)
    assert wait(server, attempt=MAX_FAILED_RUNS) is not None
    assert wait(server, attempt=MAX_FAILED_RUNS + 1) is None
    assert wait_before_resubmit(RetryConfig(), server, 2, 0.0, 1, 0.5) is None
    assert wait(refused(500), attempt=10) is not None
    assert wait(refused(500), attempt=11) is None


def test_full_queue_and_outage_are_limited_by_time_only() -> None:
    for error in (refused(429), refused(503), APIConnectionError()):
        assert wait(error, attempt=5000) is not None


def test_no_progress_gives_up_unless_detection_is_disabled() -> None:
    assert wait(refused(429), stuck=7200.0) is not None
    assert wait(refused(429), stuck=7200.1) is None
    assert wait(refused(429), RetryConfig(progress_timeout=5), stuck=6.0) is None
    assert wait(refused(429), RetryConfig(enable_stuck_detection=False), stuck=1e9) is not None


def test_waits_double_up_to_limit() -> None:
    waits = [wait(refused(429), attempt=attempt) for attempt in range(1, 8)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_longer_retry_after_is_used() -> None:
    assert wait(refused(503, retry_after_seconds=20.0)) == 20.0
    assert wait(refused(503, retry_after_seconds=0.1)) == 0.5


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.integers(1, 10**6),
    st.floats(0.0, 1.0, exclude_max=True),
    st.floats(0.0, 3.0),
    st.floats(0.0, 100.0),
)
def test_wait_is_within_jitter_bounds(
    attempt: int, jitter: float, factor: float, base: float
) -> None:
    config = RetryConfig(jitter_factor=factor, retry_delay_base=base, retry_delay_max=10.0)
    found = wait(refused(429), config, attempt, jitter=jitter)
    assert found is not None
    assert 0.0 <= found <= 10.0 * (1.0 + factor)


def test_retry_config_defaults_and_validation() -> None:
    config = RetryConfig()
    assert (config.max_connections, config.progress_timeout) == (1000, 7200)
    assert (config.retry_delay_base, config.retry_delay_max) == (0.5, 10.0)
    assert config.jitter_factor == 0.25
    assert hash(config) == hash(RetryConfig())
    assert RetryConfig(max_connections=None).max_connections is None
    with pytest.raises(InvalidInput, match="max_connections must be 1 or more, got 0"):
        RetryConfig(max_connections=0)
