"""A trainer as a process: its command is printed, signals reach it, its exit code comes back."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from tinkex.pipeline.run import run_errors
from tinkex.pipeline.run.lock import RunLock
from tinkex.pipeline.run.run_output import RunOutput

#: What a person or a machine sends to have a run end; a closed terminal counts as a request.
FORWARDED_SIGNALS = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}


@dataclass(slots=True)
class SignalForwarder:
    """Which signal has come, and to whom it goes on."""

    received: int | None = None
    is_child_running: bool = False
    """Whether a trainer runs, or is being started; it decides when to end."""
    child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def exit_code(self) -> int | None:
        """What a process ends with that was stopped; None if nobody asked for it."""
        return None if self.received is None else 128 + self.received

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on; while no trainer runs, nothing can be lost by ending at once."""
        self.received = FORWARDED_SIGNALS[signal.Signals(number)]
        if not self.is_child_running:
            raise run_errors.run_interrupted(self.received)
        if self.child is not None:
            # Nothing happens if it has ended in the meantime.
            self.child.send_signal(self.received)


@contextmanager
def forward_signals() -> Iterator[SignalForwarder]:
    """Within it, Ctrl-C and its kin go to the trainer, which saves first and then ends."""
    signals = SignalForwarder()
    before = {number: signal.signal(number, signals.handle) for number in FORWARDED_SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_child(
    command: Sequence[str],
    signals: SignalForwarder,
    lock: RunLock,
    output: RunOutput,
    *,
    stage: str,
    on_start: Callable[[int], None] = lambda pid: None,
) -> int:
    """Run a command to its end; 0, its exit code, or 128 and the signal that ended it."""
    signals.is_child_running = True
    try:
        with output.child_output() as (stdout, stderr):
            # A group of its own: Ctrl-C in a terminal would reach it twice, and twice means "now".
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                process_group=0,
                pass_fds=(lock.descriptor,),
            )
        lock.write_holder(stage, child.pid)
        return _wait(child, signals, on_start)
    finally:
        signals.child, signals.is_child_running = None, False
        lock.write_holder(None, None)


def _wait(
    child: subprocess.Popen[bytes], signals: SignalForwarder, on_start: Callable[[int], None]
) -> int:
    try:
        on_start(child.pid)
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
