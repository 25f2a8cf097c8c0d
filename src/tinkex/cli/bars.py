"""Bars as rich draws them: label, bar, count, percent, rate and time left."""

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
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from tinkex.cli.context import Screen


class RateColumn(ProgressColumn):
    """How many items come in a second."""

    def render(self, task: Task) -> Text:
        """The rate, once it is known."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.1f}/s")


def make_progress(screen: Screen, unit: Literal["items", "bytes"]) -> Progress:
    """Bars on stderr, which go away when they are done."""
    console = Console(
        file=sys.stderr, force_terminal=True, no_color=not screen.is_colored, width=screen.width
    )
    counts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TaskProgressColumn(), RateColumn())
    if unit == "bytes":
        counts = (DownloadColumn(), TransferSpeedColumn())
    label = TextColumn("{task.description}", markup=False)
    return Progress(
        label, BarColumn(), *counts, TimeRemainingColumn(), console=console, transient=True
    )
