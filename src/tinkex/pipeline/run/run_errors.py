"""Errors that end a run before its last stage is complete."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from tinkex.errors import FailureClass, TinkexError

#: Exit codes of processes that a signal ended are this plus the signal number.
_SIGNALLED = 128


class RunStopped(TinkexError):
    """A stage did not complete."""

    verdict = FailureClass(is_user_error=True, is_retryable=False)

    def __init__(self, message: str, hint: str, exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


def inputs_changed(stage: str, out_dir: str, changes: Sequence[str]) -> RunStopped:
    """Error for a stage whose inputs have changed."""
    listed = "\n".join(f"  {change}" for change in changes)
    return RunStopped(
        f"the inputs of {stage} in {out_dir} have changed:\n{listed}",
        f"Run with --restart-from {stage} to delete it and all later stages and train them again, "
        "undo the change, or set another OUT_DIR.",
    )


def stage_interrupted(stage: str, step: int | None, exit_code: int) -> RunStopped:
    """Error for a stage that was interrupted by a signal."""
    saved = f"saved at step {step}" if step is not None else "nothing was trained yet"
    return RunStopped(
        f"{stage} was interrupted; {saved}",
        "Run the same command again to resume.",
        exit_code,
    )


def run_interrupted(number: int) -> RunStopped:
    """Error for a signal while no trainer was running."""
    return RunStopped(
        "The run was interrupted; no work was lost",
        "Run the same command again to resume.",
        128 + number,
    )


def interrupted_after_training(number: int) -> RunStopped:
    """Error for a signal after the last stage."""
    return RunStopped(
        "The run was interrupted after its last stage; everything is trained and saved",
        "Run the same command again to show the results.",
        128 + number,
    )


def stage_failed(stage: str, step: int | None, exit_code: int, place: str = "above") -> RunStopped:
    """Error for a trainer that failed; `place` says where its output is."""
    next_run = f"resumes from step {step}" if step is not None else "starts the stage again"
    if name := _signal_name(exit_code):
        return RunStopped(
            f"{stage} failed: its trainer was killed by {name}",
            f"If memory ran out, lower BATCH_SIZE. The same command {next_run}.",
        )
    return RunStopped(
        f"{stage} failed: its trainer exited with code {exit_code}; its output is {place}",
        f"Fix the problem and run the same command again: it {next_run}.",
    )


def _signal_name(exit_code: int) -> str | None:
    """Return the signal name of an exit code, or None."""
    try:
        return signal.Signals(exit_code - _SIGNALLED).name
    except ValueError:
        return None


def missing_result(stage: str) -> RunStopped:
    """Error for a trainer that exited with 0 but left no result."""
    return RunStopped(
        f"{stage} failed: its trainer exited with code 0 but left no result",
        f"Run with --restart-from {stage} to train it again.",
    )
