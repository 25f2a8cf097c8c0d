"""A loss curve as shapes: where lines, dots and labels stand, whatever the size of the screen.

Lines are in a square of 1000 by 1000 that is stretched; labels stand at percentages of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

SIDE = 1000.0
#: More points than a screen has columns only make the page heavy.
MAX_POINTS = 800
#: Up to so many, every point gets a dot.
MAX_DOTS = 60
#: From so many on, a second line shows the mean of neighbours.
MIN_POINTS_FOR_MEAN = 100
#: The mean is taken over this part of all points.
_MEAN_WINDOW_DIVISOR = 40
_MARGIN = 0.06
#: Beyond this no scale is of use.
_MAX_ABS_VALUE = 1e100


class Point(NamedTuple):
    """One value of the curve."""

    x: int
    y: float


class Tick(NamedTuple):
    """A label beside the plot."""

    place: float
    """In percent, from the left or from the top."""
    label: str


class Dot(NamedTuple):
    """A point with its words."""

    left: float
    top: float
    x: int
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveLayout:
    """Everything a template needs to draw."""

    line: str
    """Corners of the line, as SVG spells them."""
    mean_line: str | None
    mean_points: int
    """How many neighbours the second line's points are the mean of."""
    dots: tuple[Dot, ...]
    first: Point
    last: Dot
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    num_left_out: int
    """Values that no scale can show."""


class _Scale(NamedTuple):
    low: float
    high: float

    def to_unit(self, value: float) -> float:
        """Where a value stands between the ends, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def layout_curve(values: Sequence[Point]) -> CurveLayout | None:
    """The curve through these points, in the order of their x; None if there is nothing to show."""
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
    """At most so many points that look the same: the ends, and each stretch's extremes."""
    if len(points) <= max_points:
        return list(points)
    num_stretches = (max_points - 2) // 2
    inner = points[1:-1]
    kept = [points[0]]
    for number in range(num_stretches):
        start = number * len(inner) // num_stretches
        stretch = inner[start : (number + 1) * len(inner) // num_stretches]
        extremes = {
            min(stretch, key=lambda point: point.y),
            max(stretch, key=lambda point: point.y),
        }
        kept += sorted(extremes)
    return [*kept, points[-1]]


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Each point as the mean of itself and its neighbours, fewer of them at the ends."""
    sums = [0.0, *accumulate(point.y for point in points)]
    reach = window // 2
    smoothed = []
    for index, point in enumerate(points):
        first, after = max(index - reach, 0), min(index + reach + 1, len(points))
        smoothed.append(Point(point.x, (sums[after] - sums[first]) / (after - first)))
    return smoothed


def _window(num_points: int) -> int:
    return num_points // _MEAN_WINDOW_DIVISOR | 1 if num_points >= MIN_POINTS_FOR_MEAN else 1


def nice_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Round numbers between two ends: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    # What is one line apart in the numbers' own precision cannot be told apart.
    return [number * step for number in range(first, min(last, first + max_ticks) + 1)]


def _padded_range(low: float, high: float, margin: float) -> tuple[float, float]:
    """Ends that are apart, with some air; a flat line runs through the middle."""
    span = high - low
    if span <= max(abs(low), abs(high)) * 1e-9:
        air = max(abs(high) * 0.1, 0.5)
        return low - air, high + air
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
    # Steps are whole numbers; marks between them would mean nothing.
    found = [at for at in nice_ticks(xs.low, xs.high, 6) if at == round(at)]
    return [Tick(_percent(xs.to_unit(at)), f"{at:,.0f}") for at in found]


def _y_ticks(ys: _Scale) -> list[Tick]:
    found = nice_ticks(ys.low, ys.high, 5)
    step = found[1] - found[0] if len(found) > 1 else abs(found[0]) if found else 1.0
    return [Tick(_percent(1 - ys.to_unit(at)), _label(at, step)) for at in found]


def _label(value: float, step: float) -> str:
    if abs(value) >= 1e6 or 0 < step < 1e-4:
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{digits}f}"
