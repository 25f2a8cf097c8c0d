"""Output of pipeline commands: stages, results and plots."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

from tinkex.charts import Point
from tinkex.cli.format import format_timestamp
from tinkex.cli.output.base import Column, Output
from tinkex.cli.output.plots import RunPlot
from tinkex.display import format_metric

if TYPE_CHECKING:
    from tinkex.pipeline.run.report import StageOutcome
    from tinkex.pipeline.run.stage_records import MetricChange
    from tinkex.pipeline.run.status import StageSummary


def _format_change(metrics: Mapping[str, MetricChange]) -> str:
    """Format the first metric of a stage, before and after."""
    for name, change in metrics.items():
        return f"{name} {format_metric(change.before)} -> {format_metric(change.after)}"
    return ""


#: Right-aligned columns.
_NUMBER_COLUMNS = frozenset(
    {"Step", "Saved", "Loss", "Before", "After", "Steps", "Tokens", "Seconds"}
)


class StageList(Output):
    """Progress of the stages in a directory."""

    def __init__(self, out_dir: str, views: Sequence[StageSummary]) -> None:
        self._out_dir = out_dir
        self._views = views

    def to_dict(self) -> dict[str, object]:
        """All fields of the stages."""
        import msgspec

        stages = [msgspec.to_builtins(view) for view in self._views]
        return {"out_dir": self._out_dir, "stages": stages}

    def columns(self) -> Sequence[Column]:
        """The most important fields."""
        names = (("Stage", 0), ("Status", 0), ("Step", 1), ("Saved", 3), ("Loss", 1))
        more = (("Held out", 2), ("Changed", 4))
        return [Column(name, rank, name in _NUMBER_COLUMNS) for name, rank in (*names, *more)]

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per stage."""
        return [
            [
                view.stage,
                f"{view.status}, stale" if view.stale else view.status,
                "" if view.step is None else f"{view.step:,}",
                "" if view.saved_step is None else f"{view.saved_step:,}",
                "" if view.loss is None else format_metric(view.loss),
                _format_change(view.metrics),
                format_timestamp(view.updated_at),
            ]
            for view in self._views
        ]

    def title(self) -> str:
        """The directory of the pipeline."""
        return f"Pipeline in {self._out_dir}"


class PipelineResults(Output):
    """Results of a pipeline run."""

    def __init__(self, out_dir: str, outcomes: Sequence[StageOutcome]) -> None:
        self._out_dir = out_dir
        self._outcomes = outcomes

    def to_dict(self) -> dict[str, object]:
        """The stages with their results."""
        import msgspec

        stages = [
            {"stage": outcome.stage, "action": outcome.action.value}
            | (msgspec.to_builtins(outcome.result) if outcome.result is not None else {})
            for outcome in self._outcomes
        ]
        return {"out_dir": self._out_dir, "stages": stages}

    def columns(self) -> Sequence[Column]:
        """Metrics before and after."""
        names = (("Stage", 0), ("", 3), ("Metric", 0), ("Before", 0), ("After", 0))
        more = (("Steps", 1), ("Tokens", 2), ("Seconds", 2))
        return [Column(name, rank, name in _NUMBER_COLUMNS) for name, rank in (*names, *more)]

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per metric."""
        from tinkex.pipeline.run.report import table_rows

        return table_rows(self._outcomes)

    def title(self) -> str:
        """The line above the table."""
        return "Results on held-out data"


class StagePlot(RunPlot):
    """One metric of a stage over its steps."""

    def __init__(
        self,
        stage: str,
        metric: str,
        metric_rows: Sequence[Mapping[str, object]],
        *,
        is_unicode: bool = True,
    ) -> None:
        super().__init__(stage, metric, [], is_unicode=is_unicode)
        self._stage = stage
        self._metric_rows = metric_rows

    @property
    def points(self) -> list[Point]:
        """The steps that have the metric."""
        return [
            Point(step, float(value))
            for row in self._metric_rows
            if is_finite_number(value := row.get(self._metric))
            and isinstance(step := row["step"], int)
        ]

    def to_dict(self) -> dict[str, object]:
        """The points."""
        points = [{"step": point.x, "value": point.y} for point in self.points]
        return {"stage": self._stage, "metric": self._metric, "points": points}

    def to_csv(self) -> bytes:
        """All metrics of all rows as CSV."""
        names = ["step", *recorded_metrics(self._metric_rows)]
        text = io.StringIO()
        out = csv.writer(text, lineterminator="\n")
        out.writerow(names)
        for row in self._metric_rows:
            out.writerow(
                [repr(row[name]) if is_finite_number(row.get(name)) else "" for name in names]
            )
        return text.getvalue().encode()


def recorded_metrics(metric_rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of all metrics with at least one finite value."""
    names = (name for row in metric_rows for name, value in row.items() if is_finite_number(value))
    return [name for name in dict.fromkeys(names) if name != "step"]


def is_finite_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
