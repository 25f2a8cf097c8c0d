from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.charts import (
    MAX_DOTS,
    MAX_POINTS,
    MIN_POINTS_FOR_MEAN,
    SIDE,
    Point,
    downsample,
    layout_curve,
    nice_ticks,
    smooth,
)

LOSSES = st.lists(st.floats(width=64), max_size=300)


def points_of(losses: list[float]) -> list[Point]:
    return [Point(number, loss) for number, loss in enumerate(losses, 1)]


def corners(line: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (corner.split(",") for corner in line.split())]


def test_no_points_give_no_curve() -> None:
    assert layout_curve([]) is None
    assert layout_curve([Point(1, math.nan), Point(2, math.inf)]) is None


def test_falling_loss_is_drawn_downwards() -> None:
    curve = layout_curve(points_of([4.0, 3.0, 2.0]))

    assert curve is not None
    drawn = corners(curve.line)
    assert [x for x, _ in drawn] == [0.0, SIDE / 2, SIDE]
    # Screens count from the top.
    assert [y for _, y in drawn] == sorted(y for _, y in drawn)
    assert (curve.last.x, curve.last.y, curve.last.left) == (3, 2.0, 100.0)
    assert [(dot.x, dot.y) for dot in curve.dots] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert curve.mean_line is None


def test_axes_have_round_labels() -> None:
    curve = layout_curve(points_of([3.9 - 0.05 * number for number in range(60)]))

    assert curve is not None
    assert [tick.label for tick in curve.x_ticks] == ["10", "20", "30", "40", "50", "60"]
    assert [tick.label for tick in curve.y_ticks] == ["1", "2", "3", "4"]
    assert [tick.label for tick in draw_ticks([0.1, 0.15, 0.32])] == [
        "0.10",
        "0.15",
        "0.20",
        "0.25",
        "0.30",
    ]


def draw_ticks(losses: list[float]) -> list[object]:
    curve = layout_curve(points_of(losses))
    assert curve is not None
    return list(curve.y_ticks)


@pytest.mark.parametrize("value", [0.0, -3.0, 2.5, 1e-12, 1e90])
def test_flat_or_single_loss_is_drawn_in_the_middle(value: float) -> None:
    for losses in ([value], [value] * 5):
        curve = layout_curve(points_of(losses))
        assert curve is not None
        assert {y for _, y in corners(curve.line)} == {SIDE / 2}


def test_nonfinite_values_are_omitted_and_counted() -> None:
    curve = layout_curve(points_of([1.0, math.nan, math.inf, -math.inf, 1e200, 2.0]))

    assert curve is not None
    assert curve.num_left_out == 4
    assert len(corners(curve.line)) == 2


@given(LOSSES)
def test_curve_stays_inside_the_chart_for_any_losses(losses: list[float]) -> None:
    curve = layout_curve(points_of(losses))

    if curve is None:
        return
    drawn = corners(curve.line) + corners(curve.mean_line or "")
    assert all(0 <= x <= SIDE and 0 <= y <= SIDE for x, y in drawn)
    assert all(-0.01 <= tick.place <= 100.01 for tick in (*curve.x_ticks, *curve.y_ticks))
    assert len(curve.y_ticks) <= 7
    assert all(0 <= dot.left <= 100 and 0 <= dot.top <= 100 for dot in (*curve.dots, curve.last))


def test_downsampling_keeps_the_extremes() -> None:
    losses = [math.sin(number) for number in range(20_000)]
    losses[7_777], losses[12_345] = 9.0, -9.0
    points = points_of(losses)

    thinned = downsample(points)

    assert len(thinned) <= MAX_POINTS
    assert thinned == sorted(thinned)
    assert set(thinned) <= set(points)
    assert {points[0], points[-1], points[7_777], points[12_345]} <= set(thinned)


@given(st.integers(0, 500), st.integers(4, 60))
def test_downsampling_returns_at_most_max_points(num_points: int, max_points: int) -> None:
    points = points_of([float(number % 7) for number in range(num_points)])

    thinned = downsample(points, max_points)

    assert len(thinned) == num_points if num_points <= max_points else len(thinned) <= max_points


def test_many_noisy_points_get_a_mean_line_and_no_dots() -> None:
    noisy = [1.0 + (-1) ** number for number in range(max(MIN_POINTS_FOR_MEAN, MAX_DOTS + 1) * 8)]

    curve = layout_curve(points_of(noisy))

    assert curve is not None
    assert curve.dots == ()
    assert curve.mean_line is not None
    heights = [y for _, y in corners(curve.mean_line)]
    assert max(heights) - min(heights) < 0.2 * SIDE
    assert curve.mean_points % 2 == 1


def test_smoothing_takes_the_mean_of_neighbours() -> None:
    smoothed = smooth(points_of([0.0, 3.0, 6.0, 0.0]), 3)

    assert [point.y for point in smoothed] == [1.5, 3.0, 3.0, 3.0]


@given(st.floats(-1e90, 1e90), st.floats(1e-6, 1e90))
def test_ticks_are_few_and_between_the_ends(low: float, span: float) -> None:
    high = low + span
    if high - low <= abs(low) * 1e-9:
        return
    ticks = nice_ticks(low, high, 5)

    assert len(ticks) <= 6
    tolerance = max(abs(low), abs(high)) * 1e-9
    assert all(low - tolerance <= tick <= high + tolerance for tick in ticks)
