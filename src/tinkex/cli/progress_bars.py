"""Build rich progress bars and spinners for stderr."""

from __future__ import annotations

import sys
from typing import Literal

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

from tinkex.cli.context import Screen
from tinkex.progress_bar import make_step_progress, make_terminal_console


class RateColumn(ProgressColumn):
    """Items per second."""

    def render(self, task: Task) -> Text:
        """Render the rate once it is known."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.1f}/s")


def make_training_bar(screen: Screen) -> Progress:
    """Create a progress bar for training steps."""
    return make_step_progress(_console(screen))


def make_spinner(screen: Screen) -> Progress:
    """Create a spinner line with text and elapsed time."""
    return Progress(
        SpinnerColumn(),
        # Wrap the text on a narrow terminal; the default is to truncate it.
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
        TimeElapsedColumn(),
        console=_console(screen),
        transient=True,
    )


def make_progress_bars(screen: Screen, unit: Literal["items", "bytes"]) -> Progress:
    """Create progress bars that disappear when they are complete."""
    counts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TaskProgressColumn(), RateColumn())
    if unit == "bytes":
        counts = (DownloadColumn(), TransferSpeedColumn())
    label = TextColumn("{task.description}", markup=False)
    return Progress(
        label, BarColumn(), *counts, TimeRemainingColumn(), console=_console(screen), transient=True
    )


def _console(screen: Screen) -> Console:
    return make_terminal_console(sys.stderr, width=screen.width, is_colored=screen.is_colored)
