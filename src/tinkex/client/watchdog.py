"""Cancel the samples of a client when none of them makes progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tinkex.errors import ResultTimeoutError, TinkexError

#: Maximum interval between checks.
CHECK_SECONDS = 60.0
#: Distinguishes the watchdog's cancellations from others.
STUCK_MESSAGE = "stuck"


class Watchdog:
    """Watches the samples of one client. Used on the I/O loop only."""

    def __init__(self, name: str, limit_seconds: float, is_enabled: Callable[[], bool]) -> None:
        self._name = name
        self._limit_seconds = limit_seconds
        self._is_enabled = is_enabled
        self._last_progress = time.monotonic()
        #: Running tasks, each with its last error.
        self._running: dict[asyncio.Task[object], TinkexError | None] = {}
        self._task: asyncio.Task[None] | None = None

    def record_progress(self) -> None:
        """Record progress of any sample."""
        self._last_progress = time.monotonic()

    def stuck_seconds(self, since: float) -> float:
        """Return the seconds without progress, counted from `since` at the earliest."""
        return time.monotonic() - max(self._last_progress, since)

    def record_error(self, error: TinkexError) -> None:
        """Record the last error of the current task: it explains more than a timeout."""
        task = asyncio.current_task()
        if task in self._running:
            self._running[task] = error

    @asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Cancel the block if no sample makes progress."""
        task = asyncio.current_task()
        assert task is not None
        if not self._running:
            self.record_progress()
        self._running[task] = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        except asyncio.CancelledError as error:
            if error.args == (STUCK_MESSAGE,):
                raise self._stuck_error(task) from None
            raise
        finally:
            del self._running[task]
            self._stop_if_idle()

    def _stuck_error(self, task: asyncio.Task[object]) -> TinkexError:
        text = f"No sample of {self._name} made progress for {self._limit_seconds:g} s"
        hint = "Raise RetryConfig.progress_timeout."
        return self._running[task] or ResultTimeoutError(None, text, hint=hint)

    def _stop_if_idle(self) -> None:
        # A sleeping watchdog would keep an unreferenced client alive.
        if not self._running and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self) -> None:
        while self._is_enabled():
            remaining = self._last_progress + self._limit_seconds - time.monotonic()
            if remaining <= 0.0:
                for task in self._running:
                    task.cancel(STUCK_MESSAGE)
                self.record_progress()
            await asyncio.sleep(min(max(remaining, 0.1), CHECK_SECONDS))
