"""Ends the work of a client when none of it moves any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tinkex.errors import ResultTimeoutError, TinkexError

#: The watchdog looks at least this often.
WATCH_SECONDS = 60.0
#: Its mark on what it ends.
STUCK = "stuck"


class Watchdog:
    """Watches the work of one client; touched by the I/O loop only."""

    def __init__(self, name: str, limit_seconds: float, is_on: Callable[[], bool]) -> None:
        self._name = name
        self._limit_seconds = limit_seconds
        self._is_on = is_on
        self._last_progress = time.monotonic()
        #: What is under way, each with its last error.
        self._running: dict[asyncio.Task[Any], TinkexError | None] = {}
        self._task: asyncio.Task[None] | None = None

    def progress(self) -> None:
        """Something moved."""
        self._last_progress = time.monotonic()

    def stuck_seconds(self, since: float) -> float:
        """How long nothing moved, counted from `since` at the earliest."""
        return time.monotonic() - max(self._last_progress, since)

    def note(self, error: TinkexError) -> None:
        """Remember what went wrong last: it says more than that nothing moves."""
        task = asyncio.current_task()
        if task in self._running:
            self._running[task] = error

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Let the watchdog end the block when nothing moves any more."""
        task = asyncio.current_task()
        assert task is not None
        if not self._running:
            self.progress()
        self._running[task] = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        except asyncio.CancelledError as error:
            if error.args == (STUCK,):
                raise self._verdict(task) from None
            raise
        finally:
            del self._running[task]
            self._rest()

    def _verdict(self, task: asyncio.Task[Any]) -> TinkexError:
        text = f"No sample of {self._name} made progress for {self._limit_seconds:g} s"
        hint = "Raise RetryConfig.progress_timeout."
        return self._running[task] or ResultTimeoutError(None, text, hint=hint)

    def _rest(self) -> None:
        # Without work there is no watchdog: its sleep would keep a forgotten client alive.
        if not self._running and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self) -> None:
        while self._is_on():
            left = self._last_progress + self._limit_seconds - time.monotonic()
            if left <= 0.0:
                for task in self._running:
                    task.cancel(STUCK)
                self.progress()
            await asyncio.sleep(min(max(left, 0.1), WATCH_SECONDS))
