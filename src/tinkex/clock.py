"""Calendar time that is not affected by jumps of the wall clock.

`now()` is the wall clock's reading at the start of the process plus the time elapsed since then,
which the kernel counts separately. Timestamps are therefore safe to compare with each other: an
age, a deadline or a retention period never changes because an operator or NTP sets the clock. All
processes of a server share one offset, and a restarted worker inherits it, so that a timestamp in
the store means the same to each of them. Machines that share a PostgreSQL store use the clock of
the database, because their own clocks differ.

The server adopts a corrected wall clock when it restarts. Code that measures an interval within
one process uses the monotonic clock; `wall_now()` is for comparisons with timestamps that another
program made, such as those of files or of another machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

_NUM_READINGS = 5


def elapsed() -> float:
    """Return seconds since boot, equal in all processes; includes suspend where supported.

    Setting the wall clock does not change it.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def wall_now() -> float:
    """Return seconds since 1970 by the wall clock, which can jump."""
    return time.time()


class Clock:
    """Calendar time that advances only with elapsed time."""

    def __init__(
        self, wall: Callable[[], float] = wall_now, elapsed: Callable[[], float] = elapsed
    ) -> None:
        self._elapsed = elapsed
        self.offset = measure_offset(wall, elapsed)
        """Seconds to add to the elapsed time."""

    def now(self) -> float:
        """Return seconds since 1970."""
        return self._elapsed() + self.offset

    def adopt_offset(self, offset: float) -> None:
        """Use the offset of the parent process, or of the store."""
        self.offset = offset


def measure_offset(wall: Callable[[], float], elapsed: Callable[[], float]) -> float:
    """Return the difference between two clocks, from the fastest of several readings."""
    readings = []
    for _ in range(_NUM_READINGS):
        before = elapsed()
        wall_time = wall()
        after = elapsed()
        readings.append((after - before, wall_time - (before + after) / 2))
    return min(readings)[1]


CLOCK = Clock()
now = CLOCK.now


def utc_now() -> datetime:
    """Return `now()` as a datetime."""
    return datetime.fromtimestamp(now(), UTC)


def to_wall_time(timestamp: float) -> float:
    """Convert a time of `now()` to the wall clock, for deadlines that a client checks."""
    # Rounded to seconds, so that without a jump the same time gives the same result.
    return timestamp + round(wall_now() - now())
