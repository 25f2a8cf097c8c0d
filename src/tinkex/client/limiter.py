"""The back-off after a 429: one deadline that everybody who shares it respects."""

from __future__ import annotations

import time
from collections.abc import Callable

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
