"""Layout of a metric curve: axis ticks, downsampling, smoothing and SVG coordinates.

Lines use a 1000 by 1000 view box that the page stretches; ticks and dots are in percent of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

SIDE = 1000.0
#: Points in a line; more than a screen has columns would only make the page larger.
MAX_POINTS = 800
#: The longest curve whose points are drawn as dots.
MAX_DOTS = 60
#: The shortest curve that gets a second line with the moving average.
MIN_POINTS_FOR_MEAN = 100
#: The moving average covers one part in this many of all points.
_MEAN_WINDOW_DIVISOR = 40
_MARGIN = 0.06
#: Larger values are left out: the scale could not show anything else.
_MAX_ABS_VALUE = 1e100


class Point(NamedTuple):
    """One point of a curve, in data coordinates."""

    x: int
    y: float


class Tick(NamedTuple):
    """A labelled position on an axis."""

    place: float
    """Percent from the left or from the top."""
    label: str


class Dot(NamedTuple):
    """A point with its position in percent and its data coordinates."""

    left: float
    top: float
    x: int
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveLayout:
    """Everything that a template needs to draw a curve."""

    line: str
    """The `points` attribute of an SVG polyline."""
    mean_line: str | None
    mean_points: int
    """Window of the moving average, in points."""
    dots: tuple[Dot, ...]
    first: Point
    last: Dot
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    num_left_out: int
    """Number of values that are too large to draw."""


class _Scale(NamedTuple):
    low: float
    high: float

    def to_unit(self, value: float) -> float:
        """Map the range to 0..1."""
        return (value - self.low) / (self.high - self.low)


def layout_curve(values: Sequence[Point]) -> CurveLayout | None:
    """Lay out a curve through points sorted by x; None if no point can be drawn."""
    points = [point for point in values if abs(point.y) <= _MAX_ABS_VALUE]
    if not points:
        return None
    xs = _Scale(*_padded_range(points[0].x, points[-1].x, 0.0))
    lowest, highest = min(point.y for point in points), max(point.y for point in points)
    ys = _Scale(*_padded_range(lowest, highest, _MARGIN))
    window = _window(len(points))
    mean = downsample(smooth(points, window)) if window > 1 else None
    dots = [_dot(point, xs, ys) for point in points] if len(points) <= MAX_DOTS else []
    return CurveLayout(
        line=_polyline(downsample(points), xs, ys),
        mean_line=_polyline(mean, xs, ys) if mean is not None else None,
        mean_points=window,
        dots=tuple(dots),
        first=points[0],
        last=_dot(points[-1], xs, ys),
        x_ticks=tuple(_x_ticks(xs)),
        y_ticks=tuple(_y_ticks(ys)),
        num_left_out=len(values) - len(points),
    )


def downsample(points: Sequence[Point], max_points: int = MAX_POINTS) -> list[Point]:
    """Reduce to `max_points`, keeping both ends and the minimum and maximum of each bucket."""
    if len(points) <= max_points:
        return list(points)
    num_buckets = (max_points - 2) // 2
    inner = points[1:-1]
    selected = [points[0]]
    for number in range(num_buckets):
        start = number * len(inner) // num_buckets
        bucket = inner[start : (number + 1) * len(inner) // num_buckets]
        extremes = {
            min(bucket, key=lambda point: point.y),
            max(bucket, key=lambda point: point.y),
        }
        selected += sorted(extremes)
    return [*selected, points[-1]]


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Centred moving average; the window is cut off at both ends."""
    sums = [0.0, *accumulate(point.y for point in points)]
    half = window // 2
    smoothed = []
    for index, point in enumerate(points):
        start, stop = max(index - half, 0), min(index + half + 1, len(points))
        smoothed.append(Point(point.x, (sums[stop] - sums[start]) / (stop - start)))
    return smoothed


def _window(num_points: int) -> int:
    return num_points // _MEAN_WINDOW_DIVISOR | 1 if num_points >= MIN_POINTS_FOR_MEAN else 1


def nice_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Round numbers in a range, at steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    # Limited to max_ticks: a range at the precision of floats could otherwise give very many.
    return [number * step for number in range(first, min(last, first + max_ticks) + 1)]


def _padded_range(low: float, high: float, margin: float) -> tuple[float, float]:
    """Add a margin to a range; a constant gets a range with itself in the middle."""
    span = high - low
    if span <= max(abs(low), abs(high)) * 1e-9:
        padding = max(abs(high) * 0.1, 0.5)
        return low - padding, high + padding
    return low - span * margin, high + span * margin


def _polyline(points: Sequence[Point], xs: _Scale, ys: _Scale) -> str:
    return " ".join(
        f"{SIDE * xs.to_unit(point.x):.1f},{SIDE * (1 - ys.to_unit(point.y)):.1f}"
        for point in points
    )


def _dot(point: Point, xs: _Scale, ys: _Scale) -> Dot:
    return Dot(_percent(xs.to_unit(point.x)), _percent(1 - ys.to_unit(point.y)), point.x, point.y)


def _percent(share: float) -> float:
    return round(100 * share, 2)


def _x_ticks(xs: _Scale) -> list[Tick]:
    # Steps are whole numbers; ticks between them would mean nothing.
    values = [value for value in nice_ticks(xs.low, xs.high, 6) if value == round(value)]
    return [Tick(_percent(xs.to_unit(value)), f"{value:,.0f}") for value in values]


def _y_ticks(ys: _Scale) -> list[Tick]:
    values = nice_ticks(ys.low, ys.high, 5)
    step = values[1] - values[0] if len(values) > 1 else abs(values[0]) if values else 1.0
    return [Tick(_percent(1 - ys.to_unit(value)), _label(value, step)) for value in values]


def _label(value: float, step: float) -> str:
    if abs(value) >= 1e6 or 0 < step < 1e-4:
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{digits}f}"
