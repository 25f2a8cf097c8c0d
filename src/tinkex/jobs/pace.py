"""How many operations make a turn: many quick ones share a commit, a slow one keeps nobody out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
#: How long the operations of one turn should take together.
TARGET_BATCH_SECONDS = 0.005
MAX_OPERATIONS = 32
#: How much the newest operation says about the next.
_EMA_WEIGHT = 0.2


class AdaptiveBatchSize:
    """A running mean of how long an operation takes."""

    def __init__(self) -> None:
        self._mean_seconds = TARGET_BATCH_SECONDS

    @property
    def max_operations(self) -> int:
        """How many operations the next turn may have."""
        return max(
            1, min(MAX_OPERATIONS, int(TARGET_BATCH_SECONDS / max(self._mean_seconds, 1e-6)))
        )

    def record(self, seconds: float) -> None:
        """Learn how long an operation took; a slow one counts at once."""
        mean = self._mean_seconds + _EMA_WEIGHT * (seconds - self._mean_seconds)
        self._mean_seconds = max(mean, seconds) if seconds > TARGET_BATCH_SECONDS else mean

    def run_timed(self, operation: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Do something and learn how long it took."""
        started = time.perf_counter()
        try:
            return operation(*args, **options)
        finally:
            self.record(time.perf_counter() - started)
