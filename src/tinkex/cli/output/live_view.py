"""Live view of a training run on a terminal: headline, chart and latest steps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tinkex.cli.context import Screen
from tinkex.cli.format import escape_line, format_duration, format_timestamp
from tinkex.cli.output.plots import draw_text_chart
from tinkex.cli.output.run_watch import (
    StepNumbering,
    format_headline,
    format_speed,
    run_state,
    step_metrics,
    step_speed,
)
from tinkex.display import format_metric, metric_label, primary_metric, select_headlines

if TYPE_CHECKING:
    from tinkex.types import RunMetricsResponse, RunStep

#: Maximum number of points in the chart and of rows in the table.
_MAX_POINTS, _MAX_ROWS = 2000, 6
_CHART_HEIGHT = 10
_LIVE_STATES = frozenset({"training", "waiting", "idle"})


@contextlib.contextmanager
def live_view(screen: Screen) -> Iterator[LiveRunView]:
    """Open a live view whose last frame stays on the terminal."""
    # Without colors this is still a terminal that can be redrawn.
    console = Console(
        file=sys.stdout,
        width=screen.width,
        force_terminal=True,
        no_color=not screen.is_colored,
        emoji=False,
        markup=False,
        highlight=False,
    )
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield LiveRunView(live, screen)


class LiveRunView:
    """Shows the state of a run, the curve of its loss or reward, and its latest steps."""

    def __init__(self, live: Live, screen: Screen) -> None:
        self._live = live
        self._screen = screen
        self._numbering = StepNumbering()
        self._steps: list[tuple[int, RunStep]] = []

    def show(self, page: RunMetricsResponse) -> None:
        """Redraw the view with the new steps."""
        self._steps = [*self._steps, *self._numbering.number(page.steps)][-_MAX_POINTS:]
        frame = render_run(page, self._steps, self._screen.width or 80)
        self._live.update(frame, refresh=True)

    def finish(self) -> None:
        """Keep the last frame."""


def render_run(
    page: RunMetricsResponse, steps: list[tuple[int, RunStep]], width: int
) -> RenderableType:
    """Render a run for a terminal of this width."""
    number, newest = steps[-1] if steps else (page.num_steps, None)
    metric = primary_metric(newest.metrics if newest else {})
    title = page.training_run_id if page.name is None else f"{page.name}  {page.training_run_id}"
    parts: list[RenderableType] = [
        Text(escape_line(title), style="bold"),
        Text(format_headline(page, number, newest)),
    ]
    values = [(float(no), step_metrics(step).get(metric)) for no, step in steps]
    points = [(no, value) for no, value in values if value is not None]
    if len(points) > 1:
        parts.append(Text(metric, style="dim"))
        parts += [
            Text(line, style="cyan") for line in draw_text_chart(points, width, _CHART_HEIGHT)
        ]
    if steps:
        parts.append(_step_table(steps[-_MAX_ROWS:]))
    else:
        parts.append(Text("No optimizer step yet."))
    if run_state(page) in _LIVE_STATES:
        parts.append(Text("Ctrl-C stops watching; the run continues.", style="dim"))
    return Group(*parts)


def _step_table(steps: list[tuple[int, RunStep]]) -> Table:
    names = list(
        select_headlines({"loss": 0.0} | {n: 0.0 for _, step in steps for n in step.metrics})
    )
    table = Table(header_style="bold")
    for heading in ("Step", *map(metric_label, names), "Tokens", "Time", "Speed", "When"):
        table.add_column(heading, justify="right")
    for number, step in steps:
        known = step_metrics(step)
        table.add_row(
            str(number),
            *(format_metric(known.get(name)) for name in names),
            f"{step.num_tokens:,}",
            format_duration(step.seconds),
            format_speed(step_speed(step)),
            format_timestamp(step.finished_at),
        )
    return table
