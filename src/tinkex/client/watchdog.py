"""Ends the work of a client when none of it moves any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tinkex.errors import ResultTimeoutError, TinkexError

#: The watchdog looks at least this often.
CHECK_SECONDS = 60.0
#: Its mark on what it ends.
STUCK_MESSAGE = "stuck"


class Watchdog:
    """Watches the work of one client; touched by the I/O loop only."""

    def __init__(self, name: str, limit_seconds: float, is_enabled: Callable[[], bool]) -> None:
        self._name = name
        self._limit_seconds = limit_seconds
        self._is_enabled = is_enabled
        self._last_progress = time.monotonic()
        #: What is under way, each with its last error.
        self._running: dict[asyncio.Task[Any], TinkexError | None] = {}
        self._task: asyncio.Task[None] | None = None

    def record_progress(self) -> None:
        """Something moved."""
        self._last_progress = time.monotonic()

    def stuck_seconds(self, since: float) -> float:
        """How long nothing moved, counted from `since` at the earliest."""
        return time.monotonic() - max(self._last_progress, since)

    def record_error(self, error: TinkexError) -> None:
        """Remember what went wrong last: it says more than that nothing moves."""
        task = asyncio.current_task()
        if task in self._running:
            self._running[task] = error

    @asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Let the watchdog end the block when nothing moves any more."""
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

    def _stuck_error(self, task: asyncio.Task[Any]) -> TinkexError:
        text = f"No sample of {self._name} made progress for {self._limit_seconds:g} s"
        hint = "Raise RetryConfig.progress_timeout."
        return self._running[task] or ResultTimeoutError(None, text, hint=hint)

    def _stop_if_idle(self) -> None:
        # Without work there is no watchdog: its sleep would keep a forgotten client alive.
        if not self._running and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self) -> None:
        while self._is_enabled():
            left = self._last_progress + self._limit_seconds - time.monotonic()
            if left <= 0.0:
                for task in self._running:
                    task.cancel(STUCK_MESSAGE)
                self.record_progress()
            await asyncio.sleep(min(max(left, 0.1), CHECK_SECONDS))
