"""The progress bar of training steps, for the command line and for the trainers."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

#: Narrower terminals show only the metrics.
MIN_BAR_COLUMNS = 64


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


def make_terminal_console(stream: TextIO, *, width: int | None = None, is_colored: bool) -> Console:
    """Return a console that updates in place on a terminal."""
    return Console(file=stream, force_terminal=True, no_color=not is_colored, width=width)
