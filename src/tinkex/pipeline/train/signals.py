"""Signals that ask a run to stop: noted at once, obeyed where everything can be saved."""

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
#: One press of Ctrl-C may arrive twice, from the terminal and from whoever started us.
_SAME_PRESS_SECONDS = 1.0

Result = TypeVar("Result")

log = get_logger(__name__)


class StopImmediately(BaseException):
    """A signal came where nothing would be lost by stopping at once."""


class StopRequest:
    """Whether somebody asked the run to stop, and how."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal that asked, or None."""
        self._requested_at = 0.0
        self._may_raise = False

    def request(self, number: int, now: float) -> None:
        """Note a signal; a second Ctrl-C waits for nothing but the write under way."""
        if self.signal is None:
            self.signal, self._requested_at = number, now
            # It may have come in the middle of a write to the same stream, which refuses another.
            with suppress(RuntimeError):
                log.warning("%s: saving, then stopping", signal.Signals(number).name)
            if self._may_raise:
                raise StopImmediately
        elif number == signal.SIGINT and now - self._requested_at >= _SAME_PRESS_SECONDS:
            raise KeyboardInterrupt

    def is_requested(self) -> bool:
        """True when the run is to stop."""
        return self.signal is not None

    def run_interruptible(self, work: Callable[[], Result]) -> Result | None:
        """Do work that changes nothing; leave it as soon as a signal comes, with None."""
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
    """Let signals ask for a stop while the block runs.

    A closed terminal asks as SIGTERM does, unless it was to be ignored (nohup). Only the main
    thread may do so; in others the request is never asked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        asked = signal.SIGTERM if number == signal.SIGHUP else number
        request.request(asked, time.monotonic())

    numbers = [*STOP_SIGNALS]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
