"""Stop signals: recorded at once, handled where the run can save everything."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

from tinkex.logs import get_logger

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: One Ctrl-C may arrive twice, from the terminal and from the parent process.
_SAME_PRESS_SECONDS = 1.0

Result = TypeVar("Result")

log = get_logger(__name__)


class StopImmediately(BaseException):
    """A signal arrived while the run could stop without losing work."""


class StopRequest:
    """The first stop signal, if one arrived."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first stop signal, or None."""
        self._requested_at = 0.0
        self._may_raise = False

    def request(self, number: int, now: float) -> None:
        """Record a signal; a second Ctrl-C interrupts at once."""
        if self.signal is None:
            self.signal, self._requested_at = number, now
            # A signal during a write to the same stream makes logging raise RuntimeError.
            with suppress(RuntimeError):
                log.warning("%s: saving, then stopping", signal.Signals(number).name)
            if self._may_raise:
                raise StopImmediately
        elif number == signal.SIGINT and now - self._requested_at >= _SAME_PRESS_SECONDS:
            raise KeyboardInterrupt

    def is_requested(self) -> bool:
        """Return True if a stop was requested."""
        return self.signal is not None

    def run_interruptible(self, work: Callable[[], Result]) -> Result | None:
        """Run work without side effects; returns None as soon as a signal arrives."""
        try:
            self._may_raise = True
            result = work() if self.signal is None else None
            self._may_raise = False
        except StopImmediately:
            self._may_raise = False
            return None
        return result


@contextmanager
def catch_signals(request: StopRequest) -> Iterator[StopRequest]:
    """Record stop signals in `request` while the block runs.

    SIGHUP counts as SIGTERM unless it is ignored (nohup). Outside the main thread signals cannot
    be handled, and the block runs without them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        stop_signal = signal.SIGTERM if number == signal.SIGHUP else number
        request.request(stop_signal, time.monotonic())

    numbers = [*STOP_SIGNALS]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
