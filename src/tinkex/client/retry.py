"""When to try again, and how long to wait: pure functions; clock and dice are arguments."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum

from tinkex import clock
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    InvalidInput,
    PromiseExpiredError,
    RequestFailedError,
    ResultTimeoutError,
    TinkexError,
)

#: A longer Retry-After is not believed.
MAX_RETRY_AFTER_SECONDS = 60.0
#: Answers that say "the server is away", not "the server refused".
UNREACHABLE_STATUSES = frozenset({502, 503, 504})
#: How often to ask again while the account has a billing issue.
BILLING_WAIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How stubborn one request is."""

    max_retries: int = 10
    """Attempts after the first, when the server answered and refused."""
    outage_seconds: float = 300.0
    """How long to keep on when the server is away. Bounded by time, not by count."""
    first_wait_seconds: float = 0.5
    """The first wait; each next one doubles."""
    max_wait_seconds: float = 10.0
    """No wait is longer."""
    retries_conflict: bool = True
    """Whether 409 means "locked, try again"."""
    billing_pause_seconds: float = 0.0
    """How long to wait for an account with a billing issue (402)."""
    has_contact: bool = True
    """Whether the server ever answered; if not, its own failures count as being away too."""


#: An answer to a long poll faster than this was none; asking again at once would be a hot loop.
MIN_LONG_POLL_SECONDS = 1.0
#: The waits after such answers.
QUICK_POLL_BACKOFF = RetryPolicy(first_wait_seconds=0.1, max_wait_seconds=10.0)
#: Send once, take the answer as it is.
NO_RETRY = RetryPolicy(max_retries=0, outage_seconds=0.0)


def wait_before_retry(
    policy: RetryPolicy, attempt: int, elapsed_seconds: float, error: TinkexError, jitter: float
) -> float | None:
    """Seconds to wait before trying again, or None to give up.

    `attempt` counts the failures of this kind in a row, from 1, and `elapsed_seconds` is how long
    they have lasted; `jitter` is a number in [0, 1).
    """
    if error.status == 402:
        left = policy.billing_pause_seconds - elapsed_seconds
        return min(BILLING_WAIT_SECONDS, left) if left > 0.0 else None
    if not error.retryable or _is_final_conflict(policy, error):
        return None
    wait = backoff(policy, attempt, jitter)
    told = getattr(error, "retry_after_seconds", None)
    if told is not None:
        wait = max(wait, told)
    if is_outage(policy, error):
        return wait if elapsed_seconds + wait <= policy.outage_seconds else None
    return wait if attempt <= policy.max_retries else None


def _is_final_conflict(policy: RetryPolicy, error: TinkexError) -> bool:
    """True for a 409 that means "already so"; the server's own word on retrying goes first."""
    if error.status != 409 or policy.retries_conflict:
        return False
    return getattr(error, "should_retry", None) is not True


def backoff(policy: RetryPolicy, attempt: int, jitter: float) -> float:
    """The exponential wait after `attempt` tries, between 75% and 100% of its full length."""
    doublings = min(attempt - 1, 30)
    full = min(policy.max_wait_seconds, policy.first_wait_seconds * 2.0**doublings)
    return float(full * (0.75 + 0.25 * jitter))


def is_unreachable(error: TinkexError) -> bool:
    """True when nobody is there to answer, as during a restart."""
    if isinstance(error, APIStatusError):
        return error.status in UNREACHABLE_STATUSES
    return isinstance(error, APIConnectionError)


class FailureKind(StrEnum):
    """Failures of one kind are counted and timed together."""

    OUTAGE = "silence"  #: nobody answers; time decides
    BILLING = "billing"  #: the account must be mended; time decides
    REJECTED = "refusal"  #: an answer, and a no; the number of tries decides


def classify_failure(policy: RetryPolicy, error: TinkexError) -> FailureKind:
    """Which kind of failure this is."""
    if error.status == 402:
        return FailureKind.BILLING
    return FailureKind.OUTAGE if is_outage(policy, error) else FailureKind.REJECTED


def is_outage(policy: RetryPolicy, error: TinkexError) -> bool:
    """True when time, not the number of tries, decides: the server is away, or never was there."""
    return is_unreachable(error) or (not policy.has_contact and (error.status or 0) >= 500)


def parse_retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds the server asks to wait, from retry-after-ms or Retry-After (seconds or a date)."""
    millis = _parse_number(headers.get("retry-after-ms"))
    seconds = millis / 1000.0 if millis is not None else _parse_number(headers.get("retry-after"))
    if seconds is None:
        # The server's own time is the right one to compare its date with.
        sent_at = now or _parse_http_date(headers.get("date")) or clock.utc_now()
        then = _parse_http_date(headers.get("retry-after"))
        seconds = (then - sent_at).total_seconds() if then is not None else None
    return valid_retry_after(seconds)


def valid_retry_after(seconds: float | None) -> float | None:
    """A wait the server asked for, unless nobody would keep it."""
    if seconds is None or not 0.0 < seconds <= MAX_RETRY_AFTER_SECONDS:
        return None
    return seconds


def parse_should_retry(headers: Mapping[str, str]) -> bool | None:
    """The server's own word on retrying, if it gave one."""
    return {"true": True, "false": False}.get(headers.get("x-should-retry", "").lower())


def _parse_number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _parse_http_date(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        then = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return then if then.tzinfo else then.replace(tzinfo=UTC)


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


#: Prompts estimated above this many bytes back off longer.
LARGE_PROMPT_BYTES = 128 * 1024
SMALL_BACKOFF_SECONDS = 1.0
LARGE_BACKOFF_SECONDS = 5.0


class RateLimiter:
    """Says how long nobody should submit. Touched by the I/O loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0
        self._started_at = 0.0

    def now(self) -> float:
        """The limiter's clock."""
        return self._clock()

    def remaining_seconds(self) -> float:
        """How long to wait before submitting; 0.0 when it is fine to go on."""
        return max(0.0, self._until - self._clock())

    def is_backing_off(self) -> bool:
        """True while a deadline is ahead."""
        return self.remaining_seconds() > 0.0

    def back_off(self, seconds: float) -> None:
        """Hold submissions back for at least this long; a deadline is only ever extended."""
        now = self._clock()
        self._started_at = now
        self._until = max(self._until, now + seconds)

    def is_recovering(self, seconds: float) -> bool:
        """True for a while after a back-off ended."""
        return self._until > 0.0 and self._clock() < self._until + seconds

    def end_backoff(self, started_at: float) -> None:
        """End the wait now, if the success that proves it stale began after it was set."""
        if started_at > self._started_at:
            # Not forgotten: one success must not let the whole crowd loose again.
            self._until = min(self._until, self._clock())


def rate_limit_backoff(prompt_bytes: int, retry_after_seconds: float | None) -> float:
    """How long a 429 holds submissions back: the longer of its word and ours."""
    is_large = prompt_bytes > LARGE_PROMPT_BYTES
    return max(
        LARGE_BACKOFF_SECONDS if is_large else SMALL_BACKOFF_SECONDS, retry_after_seconds or 0.0
    )
