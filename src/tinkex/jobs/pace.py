"""How many operations make a turn: many quick ones share a commit, a slow one keeps nobody out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
#: How long the operations of one turn should take together.
TURN_SECONDS = 0.005
MAX_OPERATIONS = 32
#: How much the newest operation says about the next.
_WEIGHT = 0.2


class Pace:
    """A running mean of how long an operation takes."""

    def __init__(self) -> None:
        self._seconds = TURN_SECONDS

    @property
    def max_operations(self) -> int:
        """How many operations the next turn may have."""
        return max(1, min(MAX_OPERATIONS, int(TURN_SECONDS / max(self._seconds, 1e-6))))

    def note(self, seconds: float) -> None:
        """Learn how long an operation took; a slow one counts at once."""
        mean = self._seconds + _WEIGHT * (seconds - self._seconds)
        self._seconds = max(mean, seconds) if seconds > TURN_SECONDS else mean

    def timed(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Do something and learn how long it took."""
        started = time.perf_counter()
        try:
            return work(*args, **options)
        finally:
            self.note(time.perf_counter() - started)
