"""A small duty that is done every few seconds, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tinkex.errors import StoreError
from tinkex.logs import get_logger

LOG = get_logger(__name__)


class PeriodicTask:
    """Does its duty until the block ends; a database in trouble is waited out."""

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
    """Watches the time that the activity file bears, by a clock that stops while a laptop sleeps.

    The file's own age would say that a machine which slept for an hour was idle for an hour, and
    the server of a client that sleeps with it would stop.
    """

    def __init__(self, now: float) -> None:
        self._activity_time: float | None = None
        self._since = now

    def idle_seconds(self, activity_time: float | None, now: float) -> float:
        """How long the file has borne the same time; None is a file that is gone."""
        if activity_time != self._activity_time:
            self._activity_time = activity_time
            self._since = now
        return now - self._since
