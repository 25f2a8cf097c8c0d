"""A trainer as a process: its command is printed, signals reach it, its exit code comes back."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from tinkex.pipeline.run import ended
from tinkex.pipeline.run.lock import RunLock
from tinkex.pipeline.run.say import Voice

#: What a person or a machine sends to have a run end; a closed terminal counts as a request.
PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}


@dataclass(slots=True)
class Signals:
    """Which signal has come, and to whom it goes on."""

    received: int | None = None
    is_waiting: bool = False
    """Whether a trainer runs, or is being started; it decides when to end."""
    child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def exit_code(self) -> int | None:
        """What a process ends with that was stopped; None if nobody asked for it."""
        return None if self.received is None else 128 + self.received

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on; while no trainer runs, nothing can be lost by ending at once."""
        self.received = PASSED_ON[signal.Signals(number)]
        if not self.is_waiting:
            raise ended.stopped(self.received)
        if self.child is not None:
            # Nothing happens if it has ended in the meantime.
            self.child.send_signal(self.received)


@contextmanager
def passing_signals() -> Iterator[Signals]:
    """Within it, Ctrl-C and its kin go to the trainer, which saves first and then ends."""
    signals = Signals()
    before = {number: signal.signal(number, signals.receive) for number in PASSED_ON}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_child(
    command: Sequence[str],
    signals: Signals,
    lock: RunLock,
    voice: Voice,
    *,
    stage: str,
    started: Callable[[int], None] = lambda pid: None,
) -> int:
    """Run a command to its end; 0, its exit code, or 128 and the signal that ended it."""
    signals.is_waiting = True
    try:
        with voice.child_output() as (stdout, stderr):
            # A group of its own: Ctrl-C in a terminal would reach it twice, and twice means "now".
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                process_group=0,
                pass_fds=(lock.descriptor,),
            )
        lock.note(stage, child.pid)
        return _wait(child, signals, started)
    finally:
        signals.child, signals.is_waiting = None, False
        lock.note(None, None)


def _wait(child: subprocess.Popen[bytes], signals: Signals, started: Callable[[int], None]) -> int:
    try:
        started(child.pid)
        signals.child = child
        if signals.received is not None:
            # It came while the trainer was being started.
            child.send_signal(signals.received)
        code = child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    return code if code >= 0 else 128 - code
