"""What a run reports: progress lines, the results, and the errors that end it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

import msgspec
from rich.console import Console
from rich.table import Table

from tinkex import clock
from tinkex.errors import FailureClass, TinkexError
from tinkex.pipeline.run.stage_records import MetricChange, StageAction, StageResult

LOG_NAME = "run.log"
_STDERR = 2


class RunOutput:
    """Writes progress lines to a stream and to the log file."""

    def __init__(
        self, stream: TextIO | None, *, log: Path | None = None, reserve_stdout: bool = False
    ) -> None:
        """Without a stream, write only to the log.

        With `reserve_stdout`, trainers write to stderr only.
        """
        self._stream = stream
        self._log = log
        self._reserve_stdout = reserve_stdout

    def with_log_file(self, log: Path) -> RunOutput:
        """Return a copy that also writes to a log file."""
        return RunOutput(self._stream, log=log, reserve_stdout=self._reserve_stdout)

    def write_line(self, text: str, stage: str | None = None) -> None:
        """Write one or more lines, with the stage as prefix if given."""
        head = f"[{stage}] " if stage else ""
        lines = [f"{head}{line}" for line in text.split("\n")]
        if self._stream is not None:
            self._stream.write("".join(f"{line}\n" for line in lines))
            # Trainers write to the same terminal or file, so flush to keep the order.
            self._stream.flush()
        if self._log is not None:
            now = clock.utc_now().astimezone().isoformat(timespec="seconds")
            with self._log.open("a", encoding="utf-8") as file:
                file.writelines(f"{now} {line}\n" for line in lines)

    @contextmanager
    def child_output(self) -> Iterator[tuple[int | IO[bytes] | None, int | IO[bytes] | None]]:
        """Yield stdout and stderr for a trainer; None means inherit."""
        if self._stream is None and self._log is not None:
            with self._log.open("ab") as file:
                yield file, file
        else:
            yield (_STDERR if self._reserve_stdout else None), None

    @property
    def location_hint(self) -> str:
        """Where to find the output of a trainer."""
        return "above" if self._stream is not None else f"in {self._log}"


HEADINGS = ("Stage", "", "Metric", "Before", "After", "Steps", "Tokens", "Seconds")


class StageOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one stage in a run."""

    stage: str
    action: StageAction
    result: StageResult | None = None
    """Content of result.json; None for the tokenizer."""


def table_rows(outcomes: Sequence[StageOutcome]) -> list[tuple[str, ...]]:
    """Return one row per metric; the first row of a stage also has its totals."""
    rows: list[tuple[str, ...]] = []
    for outcome in outcomes:
        result = outcome.result
        if result is None:
            continue
        totals = (f"{result.steps:,}", f"{result.tokens:,}", f"{result.seconds:,.1f}")
        metrics = list(result.metrics.items()) or [("", MetricChange())]
        for index, (name, change) in enumerate(metrics):
            head = (outcome.stage, outcome.action.value) if index == 0 else ("", "")
            tail = totals if index == 0 else ("", "", "")
            rows.append(
                (*head, name, _format_number(change.before), _format_number(change.after), *tail)
            )
    return rows


def write_table(rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    """Write the table: with borders on a terminal, as plain text elsewhere."""
    if not rows:
        return
    if stream.isatty():
        Console(file=stream).print(_rich_table(rows))
    else:
        stream.write(plain_table([HEADINGS, *rows]))
    stream.flush()


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns; numbers are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines)


def summary_line(outcomes: Sequence[StageOutcome], seconds: float) -> str:
    """Return the last line of a run."""
    if all(outcome.action is StageAction.SKIP for outcome in outcomes):
        return f"Nothing to do: every stage is complete ({seconds:.1f} s)."
    return f"Done in {seconds:.1f} s."


def append_results(path: Path, outcomes: Sequence[StageOutcome], out_dir: Path) -> None:
    """Append a JSON line for each stage that was trained in this run."""
    now = clock.utc_now().isoformat(timespec="seconds")
    lines = [
        msgspec.json.encode(
            {"time": now, "out_dir": str(out_dir), "action": outcome.action}
            | msgspec.to_builtins(outcome.result)
        )
        for outcome in outcomes
        if outcome.result is not None and outcome.action is not StageAction.SKIP
    ]
    if lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))


def _rich_table(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title="Results on the eval split")
    for column, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if column < 3 else "right")
    for index, row in enumerate(rows):
        is_last = index + 1 == len(rows) or bool(rows[index + 1][0])
        table.add_row(*row, end_section=is_last)
    return table


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


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
