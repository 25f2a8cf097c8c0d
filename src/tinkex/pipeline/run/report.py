"""Report the results of a run: a table, and a JSON line per stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import Console
from rich.table import Table

from tinkex import clock
from tinkex.pipeline.run.stage_decision import StageAction
from tinkex.pipeline.run.stage_records import MetricChange, StageResult

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
