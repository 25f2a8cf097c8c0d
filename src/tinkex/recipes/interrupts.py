"""Ctrl-C during a run: the first saves and stops, the second ends at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

SignalHandler = Callable[[int, FrameType | None], object] | int | None


class Stoppable(Protocol):
    """An object that can be stopped."""

    def stop(self) -> None:
        """Request a stop."""
        ...


@contextlib.contextmanager
def stop_on_interrupt(run: Stoppable, on_stop: Callable[[], None]) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `run.stop()`; the next one has its default effect.

    Does nothing outside the main thread, which alone can handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, SignalHandler] = {}

    def stop(signal_number: int, frame: FrameType | None) -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        run.stop()
        # The interrupted code may be writing to the same stream.
        with contextlib.suppress(RuntimeError):
            on_stop()

    for caught in (signal.SIGINT, signal.SIGTERM):
        before[caught] = signal.signal(caught, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
