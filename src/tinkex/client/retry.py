"""When to try again, and how long to wait: pure functions; clock and dice are arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum

from tinkex import clock
from tinkex.errors import APIConnectionError, APIStatusError, TinkexError

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
