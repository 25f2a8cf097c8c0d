"""When a sample is submitted again: a config users know, and one pure decision."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.client.retry import is_unreachable
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    InvalidInput,
    PromiseExpiredError,
    RequestFailedError,
    ResultTimeoutError,
    TinkexError,
)

#: A sample that the server ran and failed, by its own fault, is submitted again this often.
MAX_FAILED_RUNS = 3


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """How stubborn a sampling client is."""

    max_connections: int | None = 1000
    """Samples under way at once; the server's own limit wins."""
    progress_timeout: float = 7200
    """Give up when no sample of this client made progress for this many seconds."""
    retry_delay_base: float = 0.5
    """The first wait; each next one doubles."""
    retry_delay_max: float = 10.0
    """No wait is longer."""
    jitter_factor: float = 0.25
    """How much of a wait is left to chance."""
    enable_retry_logic: bool = True
    """False: every error surfaces at once."""
    enable_stuck_detection: bool = True
    """False: wait for progress for ever."""
    retryable_exceptions: tuple[type[Exception], ...] = (
        TimeoutError,
        APIConnectionError,
        PromiseExpiredError,
    )
    """Errors that are worth another submission, beside retryable statuses."""

    def __post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections <= 0:
            raise InvalidInput(f"max_connections must be 1 or more, got {self.max_connections!r}")


def wait_before_resubmit(
    config: RetryConfig,
    error: TinkexError,
    attempt: int,
    stuck_seconds: float,
    max_retries: int,
    jitter: float,
) -> float | None:
    """Seconds to wait before submitting again, or None to give up.

    `attempt` counts the submissions made, from 1; `stuck_seconds` is the time since any sample of
    this client made progress; `jitter` is a number in [0, 1).
    """
    if not config.enable_retry_logic or not is_worth_retrying(config, error):
        return None
    if config.enable_stuck_detection and stuck_seconds > config.progress_timeout:
        return None
    # A full queue or a server that is away says nothing about this request: only time counts.
    if (
        error.status != 429
        and not is_unreachable(error)
        and attempt > _max_attempts(error, max_retries)
    ):
        return None
    full = min(config.retry_delay_max, config.retry_delay_base * 2.0 ** min(attempt - 1, 30))
    wait = full * (1.0 + config.jitter_factor * (2.0 * jitter - 1.0))
    return max(0.0, wait, getattr(error, "retry_after_seconds", None) or 0.0)


def is_worth_retrying(config: RetryConfig, error: TinkexError) -> bool:
    """True when another submission may succeed."""
    is_final = isinstance(error, APIStatusError) and error.should_retry is False
    if is_final or isinstance(error, ResultTimeoutError):
        return False
    return error.retryable or isinstance(error, config.retryable_exceptions)


def _max_attempts(error: TinkexError, max_retries: int) -> int:
    is_failed_run = isinstance(error, RequestFailedError)
    return min(MAX_FAILED_RUNS, max_retries) if is_failed_run else max_retries
