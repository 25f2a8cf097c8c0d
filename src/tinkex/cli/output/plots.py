"""Plots of a metric: text charts in braille or ASCII, SVG, PNG and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import click

from tinkex.charts import Point, layout_curve, nice_ticks
from tinkex.cli.context import Format, Screen
from tinkex.cli.errors import CliError
from tinkex.cli.format import escape_line, format_count, wrap_text
from tinkex.cli.output.base import Column, Output
from tinkex.cli.output.run_watch import step_speed
from tinkex.display import format_metric, select_headlines
from tinkex.installation import install_command

if TYPE_CHECKING:
    from tinkex.types import RunStep

ChartPoints = Sequence[tuple[float, float]]

_BRAILLE = 0x2800
#: Bit of each dot in a braille character, by row and column.
_DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MIN_WIDTH, _MIN_HEIGHT = 12, 4


@dataclass(frozen=True, slots=True)
class AxisRange:
    """Value range of an axis."""

    low: float
    high: float

    @classmethod
    def covering(cls, values: Sequence[float]) -> AxisRange:
        """Create the range from minimum to maximum; a single value is centered."""
        low, high = min(values), max(values)
        if high - low > max(abs(low), abs(high)) * 1e-9:
            return cls(low, high)
        margin = max(abs(high) * 0.1, 0.5)
        return cls(low - margin, high + margin)

    def position(self, value: float, size: int) -> int:
        """Map a value to one of `size` positions."""
        fraction = (value - self.low) / (self.high - self.low)
        return min(size - 1, max(0, round(fraction * (size - 1))))


@dataclass(slots=True)
class BrailleCanvas:
    """A grid of braille characters, or of `*` without Unicode."""

    width: int
    height: int
    is_unicode: bool = True
    _cells: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def num_columns(self) -> int:
        """Number of dots per row."""
        return self.width * (2 if self.is_unicode else 1)

    @property
    def num_rows(self) -> int:
        """Number of dots per column."""
        return self.height * (4 if self.is_unicode else 1)

    def draw_line(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Draw a line between two dots, given as (column, row) from the top left."""
        (x0, y0), (x1, y1) = start, end
        num = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(num + 1):
            self._set_dot(round(x0 + (x1 - x0) * i / num), round(y0 + (y1 - y0) * i / num))

    def _set_dot(self, x: int, y: int) -> None:
        if not self.is_unicode:
            self._cells[x, y] = 1
            return
        cell = (x // 2, y // 4)
        self._cells[cell] = self._cells.get(cell, 0) | _DOT_BITS[y % 4][x % 2]

    def rows(self) -> list[str]:
        """Return the lines of text."""
        return [
            "".join(self._character(self._cells.get((x, y), 0)) for x in range(self.width)).rstrip()
            for y in range(self.height)
        ]

    def _character(self, bits: int) -> str:
        if not bits:
            return " "
        return chr(_BRAILLE + bits) if self.is_unicode else "*"


def draw_text_chart(
    points: ChartPoints, width: int, height: int, *, is_unicode: bool = True
) -> list[str]:
    """Draw a curve through points sorted by x, with axis labels."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return []
    xs, ys = AxisRange.covering([x for x, _ in finite]), AxisRange.covering([y for _, y in finite])
    height = max(height, _MIN_HEIGHT)
    labels = _y_labels(ys, height)
    margin = max(map(len, labels.values()), default=0)
    canvas = BrailleCanvas(max(width - margin - 2, _MIN_WIDTH), height, is_unicode)
    dots = [
        (
            xs.position(x, canvas.num_columns),
            canvas.num_rows - 1 - ys.position(y, canvas.num_rows),
        )
        for x, y in finite
    ]
    for start, end in zip(dots, [*dots[1:], dots[-1]], strict=True):
        canvas.draw_line(start, end)
    side, corner, floor = ("│", "└", "─") if is_unicode else ("|", "+", "-")
    drawn = [
        f"{labels.get(y, ''):>{margin}} {side}{row}".rstrip() for y, row in enumerate(canvas.rows())
    ]
    below = [f"{'':>{margin}} {corner}{floor * canvas.width}"]
    return [*drawn, *below, " " * (margin + 2) + _x_labels(xs, canvas.width)]


def _y_labels(ys: AxisRange, height: int) -> dict[int, str]:
    """Map text rows to y-axis labels."""
    ticks = nice_ticks(ys.low, ys.high, max(2, height // 2))
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ys.high - ys.low)
    return {height - 1 - ys.position(tick, height): _format_tick(tick, step) for tick in ticks}


def _x_labels(xs: AxisRange, width: int) -> str:
    """Format the x-axis labels that fit."""
    chars = [" "] * width
    ticks = [tick for tick in nice_ticks(xs.low, xs.high, 6) if tick == round(tick)]
    free = 0
    for tick in ticks:
        text = f"{tick:,.0f}"
        start = min(max(0, xs.position(tick, width) - len(text) // 2), width - len(text))
        if start >= free and start >= 0:
            chars[start : start + len(text)] = text
            free = start + len(text) + 2
    return "".join(chars).rstrip()


def _format_tick(value: float, step: float) -> str:
    if abs(value) >= 1e6 or step < 1e-4:
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:.{digits}f}"


CHART_HEIGHT = 16
#: Metrics of every step; others come from forward passes and the optimizer.
STEP_METRICS: dict[str, Callable[[RunStep], float | None]] = {
    "loss": lambda step: step.loss,
    "tokens": lambda step: step.num_tokens,
    "seconds": lambda step: step.seconds,
    "tokens_per_second": lambda step: step_speed(step),
}
#: Column names that a run's own metrics cannot use.
_RESERVED_NAMES = {*STEP_METRICS, "step", "finished_at"}


def metric_names(steps: Sequence[RunStep]) -> list[str]:
    """Return the names of all metrics of these steps."""
    recorded = dict.fromkeys((name for step in steps for name in step.metrics), 0.0)
    known = [*select_headlines(recorded), *recorded]
    return [*STEP_METRICS, *(name for name in dict.fromkeys(known) if name not in _RESERVED_NAMES)]


def metric_value(step: RunStep, metric: str) -> float | None:
    """Return a metric of a step; None if it does not have it."""
    own = STEP_METRICS.get(metric)
    return step.metrics.get(metric) if own is None else own(step)


class RunPlot(Output):
    """One metric of a run over its steps."""

    def __init__(
        self, run_id: str, metric: str, steps: Sequence[RunStep], *, is_unicode: bool = True
    ) -> None:
        self._run_id = run_id
        self._metric = metric
        self._steps = steps
        self._is_unicode = is_unicode

    @property
    def points(self) -> list[Point]:
        """The steps that have the metric."""
        pairs = ((step.step, metric_value(step, self._metric)) for step in self._steps)
        return [Point(step, value) for step, value in pairs if value is not None]

    def to_dict(self) -> dict[str, object]:
        """The points."""
        return {
            "training_run_id": self._run_id,
            "metric": self._metric,
            "points": [{"step": point.x, "value": point.y} for point in self.points],
        }

    def columns(self) -> Sequence[Column]:
        """Step and value."""
        return (Column("Step", is_number=True), Column(self._metric, is_number=True))

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per point."""
        return [[str(point.x), format_metric(point.y)] for point in self.points]

    def title(self) -> str:
        """The metric, the run, and the first and last value."""
        points = self.points
        if not points:
            return f"{self._metric} of {self._run_id}: no steps yet"
        ends = f"{format_metric(points[0].y)} to {format_metric(points[-1].y)}"
        first, last = points[0].x, points[-1].x
        if first == 1 and last == len(points):
            return f"{self._metric} of {self._run_id}: {ends} in {format_count(last, 'step')}"
        return f"{self._metric} of {self._run_id}: {ends}, steps {first:,} to {last:,}"

    def print(self, format: Format = "table", screen: Screen | None = None) -> None:
        """Print a text chart, or the points as JSON."""
        if format == "json":
            super().print(format, screen)
            return
        width = (screen.width if screen is not None else None) or 80
        lines = draw_text_chart(self.points, width, CHART_HEIGHT, is_unicode=self._is_unicode)
        title = wrap_text(escape_line(self.title()), screen or Screen())
        click.echo("\n".join([title, *lines]))

    def write(self, path: Path) -> None:
        """Write the plot atomically, in the format given by the suffix."""
        from tinkex.system.atomic import write_file_atomic

        renderers = {".csv": self.to_csv, ".svg": self.to_svg, ".png": self.to_png}
        write_file_atomic(path, renderers[path.suffix.lower()](), mode=0o644)

    def to_csv(self) -> bytes:
        """All metrics of all steps as CSV."""
        recorded = metric_names(self._steps)[len(STEP_METRICS) :]
        text = io.StringIO()
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["step", "finished_at", *STEP_METRICS, *recorded])
        for step in self._steps:
            values = (metric_value(step, name) for name in (*STEP_METRICS, *recorded))
            cells = ["" if value is None else repr(value) for value in values]
            out.writerow([step.step, step.finished_at.isoformat(), *cells])
        return text.getvalue().encode()

    def to_svg(self) -> bytes:
        """The plot as SVG; needs no library."""
        return render_svg(self.points, self.title()).encode()

    def to_png(self) -> bytes:
        """The plot as PNG; needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise CliError(
                f"A .png plot needs matplotlib: {error}",
                f"Run {install_command('plot')}, or write a .svg file, which needs no library.",
            ) from error
        figure = Figure(figsize=(9.0, 5.0), layout="constrained")
        axes = figure.subplots()
        points = self.points
        axes.plot([point.x for point in points], [point.y for point in points], linewidth=1.2)
        axes.set(title=self.title(), xlabel="step", ylabel=self._metric)
        axes.grid(alpha=0.3)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=144)
        return out.getvalue()


_SVG_WIDTH, _SVG_HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 900, 480, 80, 40, 20, 40


def render_svg(points: Sequence[Point], title: str) -> str:
    """Render a curve with axis labels as SVG."""
    curve = layout_curve(points)
    inner_width, inner_height = _SVG_WIDTH - _LEFT - _RIGHT, _SVG_HEIGHT - _TOP - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SVG_WIDTH} {_SVG_HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{_SVG_WIDTH}" height="{_SVG_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(escape_line(title))}</text>',
    ]
    for tick in curve.y_ticks if curve else ():
        y = _TOP + inner_height * tick.place / 100
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{inner_width}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick.label}</text>')
    for tick in curve.x_ticks if curve else ():
        x = _LEFT + inner_width * tick.place / 100
        parts.append(
            f'<text x="{x:.1f}" y="{_SVG_HEIGHT - 14}" text-anchor="middle">{tick.label}</text>'
        )
    if curve is not None:
        parts.append(
            f'<svg x="{_LEFT}" y="{_TOP}" width="{inner_width}" height="{inner_height}" '
            'viewBox="0 0 1000 1000" preserveAspectRatio="none">'
            f'<polyline points="{curve.line}" fill="none" stroke="#1f6feb" stroke-width="1.5" '
            'vector-effect="non-scaling-stroke"/></svg>'
        )
    return "\n".join([*parts, "</svg>\n"])
