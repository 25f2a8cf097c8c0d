"""How a run ends before its last stage is done."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from tinkex.errors import FailureClass, TinkexError

#: A process that a signal ended is said to have this code and the signal's number.
_SIGNALLED = 128


class RunStopped(TinkexError):
    """A stage did not come to its end."""

    verdict = FailureClass(is_user_error=True, is_retryable=False)

    def __init__(self, message: str, hint: str, exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


def inputs_changed(stage: str, out_dir: str, changes: Sequence[str]) -> RunStopped:
    """Something that a stage was made from has changed."""
    listed = "\n".join(f"  {change}" for change in changes)
    return RunStopped(
        f"{stage} in {out_dir} was made from something else; what changed:\n{listed}",
        f"Run with --restart-from {stage} to throw it and all later stages away and train them "
        "again, undo the change, or set another OUT_DIR.",
    )


def stage_interrupted(stage: str, step: int | None, exit_code: int) -> RunStopped:
    """Somebody stopped the run."""
    saved = f"its work is saved at step {step}" if step is not None else "nothing was trained yet"
    return RunStopped(
        f"{stage} was interrupted; {saved}",
        "Run the same command again, and it goes on from there.",
        exit_code,
    )


def run_interrupted(number: int) -> RunStopped:
    """Somebody stopped the run while no trainer was at work."""
    return RunStopped(
        "The run was interrupted; nothing is lost",
        "Run the same command again, and it goes on from there.",
        128 + number,
    )


def interrupted_after_training(number: int) -> RunStopped:
    """Somebody stopped the run when there was nothing left to train."""
    return RunStopped(
        "The run was interrupted after its last stage; everything is trained and saved",
        "Run the same command again for the table of results.",
        128 + number,
    )


def stage_failed(stage: str, step: int | None, exit_code: int, place: str = "above") -> RunStopped:
    """A trainer gave up; its last lines are in a place."""
    again = f"goes on from step {step}" if step is not None else "starts it again"
    if name := _signal_name(exit_code):
        return RunStopped(
            f"{stage} failed: its trainer was ended by {name}",
            f"If memory ran out, lower BATCH_SIZE. Run the same command again: it {again}.",
        )
    return RunStopped(
        f"{stage} failed: its trainer ended with exit code {exit_code}; its last lines are {place}",
        f"Put right what they say and run the same command again: it {again}.",
    )


def _signal_name(exit_code: int) -> str | None:
    """The signal that an exit code stands for; None for any other code."""
    try:
        return signal.Signals(exit_code - _SIGNALLED).name
    except ValueError:
        return None


def missing_result(stage: str) -> RunStopped:
    """A trainer said that all is well, and left nothing."""
    return RunStopped(
        f"{stage} failed: its trainer ended well and left no result",
        f"Run with --restart-from {stage} to train it again.",
    )
