"""Retry decisions as pure functions: whether to retry and how long to wait.

Covers single requests and resubmission of samples. Clock and jitter are arguments; `rate_limits`
delays submissions after a 429.
"""

from __future__ import annotations

from collections.abc import Mapping
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

#: A longer Retry-After is ignored.
MAX_RETRY_AFTER_SECONDS = 60.0
#: Statuses of an unreachable server (as opposed to a rejected request).
UNREACHABLE_STATUSES = frozenset({502, 503, 504})
#: Interval between retries while the account has a billing issue.
BILLING_WAIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long to retry one request."""

    max_retries: int = 10
    """Attempts after the first, if the server rejected the request."""
    outage_seconds: float = 300.0
    """How long to retry while the server is unreachable. Limited by time, not by count."""
    first_wait_seconds: float = 0.5
    """The first wait; each further wait is twice as long."""
    max_wait_seconds: float = 10.0
    """The longest wait."""
    retries_conflict: bool = True
    """Whether 409 means "locked, try again"."""
    billing_pause_seconds: float = 0.0
    """How long to wait for an account with a billing issue (402)."""
    has_contact: bool = True
    """Whether the server has ever responded; if not, a 5xx status counts as unreachable too."""


#: A faster response means that the server does not long-poll; the next poll needs a wait.
MIN_LONG_POLL_SECONDS = 1.0
#: The waits after such responses.
QUICK_POLL_BACKOFF = RetryPolicy(first_wait_seconds=0.1, max_wait_seconds=10.0)
#: Send once.
NO_RETRY = RetryPolicy(max_retries=0, outage_seconds=0.0)


def wait_before_retry(
    policy: RetryPolicy, attempt: int, elapsed_seconds: float, error: TinkexError, jitter: float
) -> float | None:
    """Return the seconds to wait before a retry, or None to give up.

    `attempt` counts consecutive failures of this kind from 1, and `elapsed_seconds` is the time
    since the first of them; `jitter` is a number in [0, 1).
    """
    if error.status == 402:
        remaining = policy.billing_pause_seconds - elapsed_seconds
        return min(BILLING_WAIT_SECONDS, remaining) if remaining > 0.0 else None
    if not error.retryable or _is_final_conflict(policy, error):
        return None
    wait = backoff(policy, attempt, jitter)
    wait = max(wait, getattr(error, "retry_after_seconds", None) or 0.0)
    if is_outage(policy, error):
        return wait if elapsed_seconds + wait <= policy.outage_seconds else None
    return wait if attempt <= policy.max_retries else None


def _is_final_conflict(policy: RetryPolicy, error: TinkexError) -> bool:
    """True for a 409 that means "already done", unless the server asks for a retry."""
    if error.status != 409 or policy.retries_conflict:
        return False
    return getattr(error, "should_retry", None) is not True


def backoff(policy: RetryPolicy, attempt: int, jitter: float) -> float:
    """Return the exponential wait after `attempt` failures, with up to 25% jitter."""
    doublings = min(attempt - 1, 30)
    full = min(policy.max_wait_seconds, policy.first_wait_seconds * 2.0**doublings)
    return float(full * (0.75 + 0.25 * jitter))


def is_unreachable(error: TinkexError) -> bool:
    """True if the server cannot be reached, as during a restart."""
    if isinstance(error, APIStatusError):
        return error.status in UNREACHABLE_STATUSES
    return isinstance(error, APIConnectionError)


class FailureKind(StrEnum):
    """Failures of one kind are counted and timed together."""

    OUTAGE = "outage"  #: the server is unreachable; limited by time
    BILLING = "billing"  #: the account has a billing issue; limited by time
    REJECTED = "rejected"  #: the server rejected the request; limited by attempts


def classify_failure(policy: RetryPolicy, error: TinkexError) -> FailureKind:
    """Return the kind of a failure."""
    if error.status == 402:
        return FailureKind.BILLING
    return FailureKind.OUTAGE if is_outage(policy, error) else FailureKind.REJECTED


def is_outage(policy: RetryPolicy, error: TinkexError) -> bool:
    """True if the server is unreachable; a 5xx counts too until the server has responded once."""
    return is_unreachable(error) or (not policy.has_contact and (error.status or 0) >= 500)


class RetryStreak:
    """Counts consecutive failures of the same kind for one request."""

    def __init__(self) -> None:
        self._kind: FailureKind | None = None
        self._since = 0.0
        self._count = 0
        self._had_lost_response = False

    def wait_after(
        self, policy: RetryPolicy, error: TinkexError, sent_at: float, now: float, jitter: float
    ) -> float | None:
        """Return the seconds to wait after this failure, or None to give up."""
        kind = classify_failure(policy, error)
        if kind is not self._kind:
            self._kind, self._since, self._count = kind, sent_at, 0
        self._count += 1
        self._had_lost_response |= isinstance(error, APIConnectionError)
        return wait_before_retry(policy, self._count, now - self._since, error, jitter)

    def is_already_applied(self, success_statuses: frozenset[int], error: TinkexError) -> bool:
        """True if the error means that an earlier attempt, whose response was lost, succeeded."""
        return self._had_lost_response and error.status in success_statuses


def parse_retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Parse retry-after-ms or Retry-After (seconds or a date) into seconds."""
    millis = _parse_number(headers.get("retry-after-ms"))
    seconds = millis / 1000.0 if millis is not None else _parse_number(headers.get("retry-after"))
    if seconds is None:
        # Compare with the server's clock, which may differ from this one.
        sent_at = now or _parse_http_date(headers.get("date")) or clock.utc_now()
        retry_at = _parse_http_date(headers.get("retry-after"))
        seconds = (retry_at - sent_at).total_seconds() if retry_at is not None else None
    return valid_retry_after(seconds)


def valid_retry_after(seconds: float | None) -> float | None:
    """Return a wait requested by the server, or None if it is out of range."""
    if seconds is None or not 0.0 < seconds <= MAX_RETRY_AFTER_SECONDS:
        return None
    return seconds


def parse_should_retry(headers: Mapping[str, str]) -> bool | None:
    """Parse x-should-retry; None if the server did not send it."""
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
        parsed = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


#: How often to resubmit a sample that failed on the server with a server error.
MAX_FAILED_RUNS = 3


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """How a sampling client retries."""

    max_connections: int | None = 1000
    """Maximum number of concurrent samples; a lower limit of the server takes precedence."""
    progress_timeout: float = 7200
    """Give up if no sample of this client made progress for this many seconds."""
    retry_delay_base: float = 0.5
    """The first wait in seconds; each further wait is twice as long."""
    retry_delay_max: float = 10.0
    """The longest wait in seconds."""
    jitter_factor: float = 0.25
    """The random share of a wait."""
    enable_retry_logic: bool = True
    """False: raise every error immediately."""
    enable_stuck_detection: bool = True
    """False: wait for progress without limit."""
    retryable_exceptions: tuple[type[Exception], ...] = (
        TimeoutError,
        APIConnectionError,
        PromiseExpiredError,
    )
    """Errors to resubmit after, in addition to retryable statuses."""

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
    """Return the seconds to wait before resubmitting, or None to give up.

    `attempt` counts the submissions from 1; `stuck_seconds` is the time since any sample of
    this client made progress; `jitter` is a number in [0, 1).
    """
    if not config.enable_retry_logic or not is_worth_retrying(config, error):
        return None
    if config.enable_stuck_detection and stuck_seconds > config.progress_timeout:
        return None
    # A full queue or an outage is not a failure of this request: limited by time only.
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
    """True if another submission may succeed."""
    is_final = isinstance(error, APIStatusError) and error.should_retry is False
    if is_final or isinstance(error, ResultTimeoutError):
        return False
    return error.retryable or isinstance(error, config.retryable_exceptions)


def _max_attempts(error: TinkexError, max_retries: int) -> int:
    is_failed_run = isinstance(error, RequestFailedError)
    return min(MAX_FAILED_RUNS, max_retries) if is_failed_run else max_retries
