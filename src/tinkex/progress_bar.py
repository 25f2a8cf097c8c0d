"""Progress bars and spinners of rich, for the command line and for the trainers."""

from __future__ import annotations

from typing import Literal, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

#: Narrower terminals show only the metrics.
MIN_BAR_COLUMNS = 64


def make_terminal_console(stream: TextIO, *, width: int | None = None, is_colored: bool) -> Console:
    """Return a console that updates in place on a terminal."""
    return Console(file=stream, force_terminal=True, no_color=not is_colored, width=width)


def make_step_progress(console: Console, *, label: str = "", auto_refresh: bool = True) -> Progress:
    """Return a transient progress bar of steps; its description shows the newest metrics."""
    is_narrow = console.width < MIN_BAR_COLUMNS
    columns: tuple[ProgressColumn, ...] = (
        *((TextColumn(label, markup=False),) if label else ()),
        MofNCompleteColumn(),
        # The metrics matter more than the bar.
        *(() if is_narrow else (BarColumn(bar_width=None), TimeRemainingColumn())),
        TextColumn("{task.description}", markup=False),
    )
    return Progress(
        *columns, console=console, transient=True, expand=True, auto_refresh=auto_refresh
    )


def make_spinner(console: Console) -> Progress:
    """Return a spinner line with text and elapsed time."""
    return Progress(
        SpinnerColumn(),
        # Wrap the text on a narrow terminal; the default is to truncate it.
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


class RateColumn(ProgressColumn):
    """Items per second."""

    def render(self, task: Task) -> Text:
        """Render the rate once it is known."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.1f}/s")


def make_progress_bars(console: Console, unit: Literal["items", "bytes"]) -> Progress:
    """Return progress bars that disappear when they are complete."""
    counts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TaskProgressColumn(), RateColumn())
    if unit == "bytes":
        counts = (DownloadColumn(), TransferSpeedColumn())
    label = TextColumn("{task.description}", markup=False)
    return Progress(
        label, BarColumn(), *counts, TimeRemainingColumn(), console=console, transient=True
    )
