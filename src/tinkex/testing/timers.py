"""Time for the stub server: actions for later and waits, both of which survive a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """What the orderly part of the server needs of time; tests bring their own."""

    def later(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Run the action after this long."""
        ...


@dataclass(slots=True, eq=False)
class Timer:
    """An action that is due at a time."""

    due_at: float
    action: Callable[[], None]
    is_over: bool = False

    def cancel(self) -> None:
        """Let it not happen, if it has not."""
        self.is_over = True


class LoopClock:
    """The clock of a running event loop; without one, timers wait for the next."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timers: set[Timer] = set()
        self._sleepers: set[asyncio.Future[bool]] = set()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on with this loop; what became due in between happens at once."""
        self._loop = loop
        for timer in sorted(self._timers, key=lambda timer: timer.due_at):
            self._schedule(loop, timer)

    def detach(self) -> None:
        """Wake whoever waits and keep the timers."""
        self._loop = None
        wake(self._sleepers, in_time=False)

    def later(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Run the action after this long."""
        timer = Timer(time.monotonic() + seconds, action)
        self._timers.add(timer)
        if self._loop is not None:
            self._schedule(self._loop, timer)
        return timer

    def _schedule(self, loop: asyncio.AbstractEventLoop, timer: Timer) -> None:
        loop.call_later(max(0.0, timer.due_at - time.monotonic()), self._fire, timer)

    def _fire(self, timer: Timer) -> None:
        self._timers.discard(timer)
        if not timer.is_over:
            timer.is_over = True
            timer.action()

    async def wait(self, seconds: float, waiters: set[asyncio.Future[bool]] | None = None) -> bool:
        """Wait until `wake(waiters)`: True; until the time is up or the server stops: False."""
        if self._loop is None:
            return False
        sleeper: asyncio.Future[bool] = self._loop.create_future()
        groups = [self._sleepers] if waiters is None else [self._sleepers, waiters]
        for group in groups:
            group.add(sleeper)
        alarm = self._loop.call_later(seconds, wake, (sleeper,), False)
        try:
            return await sleeper
        finally:
            alarm.cancel()
            for group in groups:
                group.discard(sleeper)


def wake(waiters: Iterable[asyncio.Future[bool]], in_time: bool = True) -> None:
    """End these waits."""
    for waiter in tuple(waiters):
        if not waiter.done():
            waiter.set_result(in_time)
