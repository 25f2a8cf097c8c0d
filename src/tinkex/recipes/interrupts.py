"""Ctrl-C while a run goes on: the first saves and stops, the second ends at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol


class Stoppable(Protocol):
    """What can be asked to stop."""

    def stop(self) -> None:
        """Stop soon."""
        ...


@contextlib.contextmanager
def stop_on_interrupt(run: Stoppable, on_stop: Callable[[], None]) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `run.stop()`; the next one does what it always did.

    Signals belong to the main thread; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        run.stop()
        # Whoever was interrupted may have been writing to the same stream.
        with contextlib.suppress(RuntimeError):
            on_stop()

    for caught in (signal.SIGINT, signal.SIGTERM):
        before[caught] = signal.signal(caught, stop)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
