"""Curves of all metrics of a run, by column, downsampled for charts."""

from __future__ import annotations

import csv
import io
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tinkex import types
from tinkex.charts import Point, downsample
from tinkex.display import HEADLINE_METRICS, is_headline
from tinkex.jobs.job_types import TOTAL_WEIGHT_METRIC, JobKind
from tinkex.server.http.run_history import LOSS_METRIC, NumberedStep, group_steps

#: Metrics of one run that have a curve; more are left out.
MAX_METRICS = 64
#: Points of one curve; more than a screen has columns would only make the answer larger.
MAX_POINTS = 1000
#: Points of all curves of an answer.
MAX_TOTAL_POINTS = 60_000
_MIN_POINTS = 50
#: Metrics from which others are computed; they have no meaning of their own.
_HIDDEN = frozenset({LOSS_METRIC, TOTAL_WEIGHT_METRIC, "step", "has_gradient"})
#: After headline and evaluation metrics come these, then the rest.
_COMMON = ("learning_rate", "grad_norm", "tokens_per_second")


class Column(NamedTuple):
    """The values of one metric; steps without a value are left out."""

    steps: array[int]
    values: array[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurves:
    """The metrics of a run's optimizer steps; `extend_curves` adds newer steps."""

    columns: Mapping[str, Column] = field(default_factory=dict)
    last_no: int = 0
    """The number of the last step record that is included."""
    last_step: int = 0
    num_left_out: int = 0
    """Values of metrics beyond the maximum number."""

    @property
    def version(self) -> tuple[int, ...]:
        """Changes whenever steps or values were added."""
        num_values = sum(len(column.values) for column in self.columns.values())
        return self.last_no, self.last_step, num_values, len(self.columns)


def extend_curves(curves: RunCurves, rows: Sequence[NumberedStep], num_steps: int) -> RunCurves:
    """Return the curves extended by newer step records, up to the run's step `num_steps`."""
    num_new = sum(1 for _, row in rows if row.kind == JobKind.OPTIM_STEP)
    new_steps = group_steps(rows, num_steps - num_new)
    if not new_steps:
        return curves
    columns = {
        name: Column(column.steps[:], column.values[:]) for name, column in curves.columns.items()
    }
    num_left_out = curves.num_left_out
    for step in new_steps:
        for name, value in _step_metrics(step).items():
            if name not in columns and len(columns) >= MAX_METRICS:
                num_left_out += 1
                continue
            column = columns.setdefault(name, Column(array("q"), array("d")))
            column.steps.append(step.step)
            column.values.append(value)
    last = new_steps[-1]
    return replace(
        curves,
        columns=columns,
        last_no=last.cursor,
        last_step=last.step,
        num_left_out=num_left_out,
    )


def _step_metrics(step: types.RunStep) -> dict[str, float]:
    metrics = {name: value for name, value in step.metrics.items() if name not in _HIDDEN}
    if step.loss is not None:
        metrics["loss"] = step.loss
    if step.seconds > 0 and step.num_tokens:
        metrics["tokens_per_second"] = step.num_tokens / step.seconds
    return metrics


def drop_steps_before(curves: RunCurves, first_step: int) -> RunCurves:
    """Return the curves without steps that the store has deleted."""
    starts = {name: bisect_left(each.steps, first_step) for name, each in curves.columns.items()}
    if not any(starts.values()):
        return curves
    kept = {
        name: Column(column.steps[starts[name] :], column.values[starts[name] :])
        for name, column in curves.columns.items()
    }
    return replace(curves, columns={name: each for name, each in kept.items() if each.steps})


def sort_metrics(names: Iterable[str]) -> list[str]:
    """Sort names for display: headline and evaluation metrics, common ones, then the rest."""

    def place(name: str) -> tuple[int, str]:
        if name in HEADLINE_METRICS:
            return HEADLINE_METRICS.index(name), ""
        if is_headline(name):
            return len(HEADLINE_METRICS), name
        if name in _COMMON:
            return len(HEADLINE_METRICS) + 1 + _COMMON.index(name), ""
        return len(HEADLINE_METRICS) + 1 + len(_COMMON), name

    return sorted(set(names), key=place)


def max_points_of(num_curves: int) -> int:
    """The number of points of each curve of an answer with this many."""
    return max(_MIN_POINTS, min(MAX_POINTS, MAX_TOTAL_POINTS // max(num_curves, 1)))


def select_points(
    column: Column, max_points: int, first: int = 0, last: int = 2**62
) -> tuple[list[int], list[float]]:
    """The steps and values to draw in a range of steps; keeps both ends and the extremes.

    The nearest step before and after the range is included, so that lines reach its ends.
    """
    start = max(bisect_left(column.steps, first) - 1, 0)
    stop = bisect_right(column.steps, last) + 1
    column = Column(column.steps[start:stop], column.values[start:stop])
    if len(column.steps) <= max_points:
        return column.steps.tolist(), column.values.tolist()
    points = downsample(list(map(Point, column.steps, column.values)), max_points)
    return [point.x for point in points], [point.y for point in points]


def write_csv(curves: RunCurves) -> str:
    """All values as CSV: a row per step, a column per metric."""
    names = sort_metrics(curves.columns)
    rows: dict[int, dict[str, float]] = {}
    for name in names:
        for step, value in zip(*curves.columns[name], strict=True):
            rows.setdefault(step, {})[name] = value
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["step", *map(_csv_name, names)])
    for step in sorted(rows):
        writer.writerow([step, *(rows[step].get(name, "") for name in names)])
    return text.getvalue()


def _csv_name(name: str) -> str:
    """A name that spreadsheets do not take for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name
