"""Periodic tasks on background threads, and the idle timer of the supervisor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tinkex.errors import StoreError
from tinkex.logs import get_logger

LOG = get_logger(__name__)


class PeriodicTask:
    """Call a function every few seconds until the `with` block ends; log store errors and retry."""

    def __init__(self, name: str, function: Callable[[], None], interval_seconds: float) -> None:
        self._name = name
        self._function = function
        self._interval_seconds = interval_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            try:
                self._function()
            except (StoreError, OSError) as error:
                LOG.warning("%s: %s", self._name, error)


class IdleTimer:
    """Measure how long the activity file has not been touched, on the monotonic clock.

    That clock stops while a laptop sleeps. By the wall clock, a machine that slept for an hour
    would count as idle for an hour, and the server of a client on it would stop.
    """

    def __init__(self, now: float) -> None:
        self._activity_time: float | None = None
        self._since = now

    def idle_seconds(self, activity_time: float | None, now: float) -> float:
        """Seconds since the file's modification time changed; None means the file is missing."""
        if activity_time != self._activity_time:
            self._activity_time = activity_time
            self._since = now
        return now - self._since
