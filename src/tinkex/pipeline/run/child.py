"""Run a trainer as a child process and forward signals to it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from tinkex.pipeline.output_locks import RunLock
from tinkex.pipeline.run import report
from tinkex.pipeline.run.report import RunOutput

#: Stop signals and what the trainer receives; SIGHUP (closed terminal) becomes SIGTERM.
FORWARDED_SIGNALS = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}


@dataclass(slots=True)
class SignalForwarder:
    """Records a stop signal and forwards it to the trainer."""

    received: int | None = None
    is_child_running: bool = False
    """True while a trainer runs or starts; the trainer then decides when to stop."""
    child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def exit_code(self) -> int | None:
        """Exit code after a signal, or None if none arrived."""
        return None if self.received is None else 128 + self.received

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal; without a trainer, stop at once."""
        self.received = FORWARDED_SIGNALS[signal.Signals(number)]
        if not self.is_child_running:
            raise report.run_interrupted(self.received)
        if self.child is not None:
            # Does nothing if the child has already exited.
            self.child.send_signal(self.received)


@contextmanager
def forward_signals() -> Iterator[SignalForwarder]:
    """Forward stop signals to the trainer, which saves and then exits, while the block runs."""
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
    """Run a command; returns its exit code, or 128 + the signal that ended it."""
    signals.is_child_running = True
    try:
        with output.child_output() as (stdout, stderr):
            # Its own process group: otherwise Ctrl-C would reach it twice, which means "stop now".
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
            # The signal arrived while the trainer was starting.
            child.send_signal(signals.received)
        code = child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    return code if code >= 0 else 128 - code
