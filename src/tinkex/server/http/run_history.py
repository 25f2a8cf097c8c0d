"""Updates of a model: an optimizer step with its passes, its loss and its speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from math import isfinite

from tinkex import types
from tinkex.charts import CurveLayout, Point, layout_curve
from tinkex.headline_metrics import is_headline, primary_metric
from tinkex.jobs.job_types import TOTAL_WEIGHT_METRIC, JobKind
from tinkex.store import steps
from tinkex.store.database import Connection
from tinkex.store.records import RunRecord, StepRecord

LOSS_METRIC = "loss:sum"
#: Passes that the speed is measured over.
NUM_SPEED_PASSES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUpdate:
    """One optimizer step, with the passes whose gradients it applied."""

    no: int
    """The number of its last step in the store."""
    loss: float | None
    """Per token; None if no pass has told its loss."""
    num_tokens: int
    num_passes: int
    seconds: float
    """From the start of its first pass to its end."""
    finished_at: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What its client reported about it."""

    def value_of(self, metric: str) -> float | None:
        """A metric by name; None if it is not known."""
        return self.loss if metric == "loss" else self.metrics.get(metric)


def build_update(
    passes: Sequence[tuple[int, StepRecord]], optim_step: tuple[int, StepRecord] | None
) -> OptimizerUpdate:
    """The update that some passes make, with its optimizer step or before it."""
    steps = [step for _, step in passes]
    last_no, last = optim_step if optim_step is not None else passes[-1]
    first = steps[0] if steps else last
    reported = _reported_metrics(last if optim_step is not None else None)
    return OptimizerUpdate(
        no=last_no,
        loss=reported.get("loss", loss_per_token(steps)),
        num_tokens=sum(step.num_tokens for step in steps),
        num_passes=len(steps),
        seconds=last.finished_at - first.started_at,
        finished_at=last.finished_at,
        metrics=reported,
    )


def _reported_metrics(step: StepRecord | None) -> dict[str, float]:
    """The metrics of an optimizer step that say how training goes."""
    told = (step.metrics or {}) if step is not None else {}
    return {name: told[name] for name in told if is_headline(name) and isfinite(told[name])}


def loss_per_token(passes: Sequence[StepRecord]) -> float | None:
    """The mean loss of the tokens of some passes, as they are weighed if they are."""
    told = [(step.num_tokens, step.metrics) for step in passes if step.metrics is not None]
    counted = [(num, metrics) for num, metrics in told if LOSS_METRIC in metrics]
    weight = sum(metrics.get(TOTAL_WEIGHT_METRIC, num) for num, metrics in counted)
    if weight <= 0:
        return None
    loss = sum(metrics[LOSS_METRIC] for _, metrics in counted) / weight
    # The page reads JSON, which has no other numbers: it draws a gap.
    return loss if isfinite(loss) else None


def tokens_per_second(passes: Sequence[StepRecord]) -> float | None:
    """How fast some passes were, with the pauses between them."""
    if not passes:
        return None
    seconds = max(step.finished_at for step in passes) - min(step.started_at for step in passes)
    return sum(step.num_tokens for step in passes) / seconds if seconds > 0 else None


NumberedStep = tuple[int, StepRecord]
#: By the end of a metric's name; all others are means.
_REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "min": min,
    "max": max,
}


def list_newest_steps(db: Connection, run: RunRecord, limit: int) -> list[types.RunStep]:
    """The newest optimizer steps of a run, oldest first."""
    # One more, to know where the first one begins.
    ends = steps.last_numbers_of_kind(db, run.id, JobKind.OPTIM_STEP, limit=limit + 1)
    after, ends = (ends[0], ends[1:]) if len(ends) > limit else (0, ends)
    if not ends:
        return []
    return group_steps(steps.list_between(db, run.id, after, ends[-1]), run.num_steps - len(ends))


def list_steps_after(db: Connection, run: RunRecord, after: int, limit: int) -> list[types.RunStep]:
    """The first optimizer steps of a run after a cursor, oldest first."""
    ends = steps.first_numbers_of_kind(db, run.id, JobKind.OPTIM_STEP, after_no=after, limit=limit)
    if not ends:
        return []
    num_before = run.num_steps - steps.count_after(db, run.id, JobKind.OPTIM_STEP, after)
    return group_steps(steps.list_between(db, run.id, after, ends[-1]), num_before)


def group_steps(rows: Sequence[NumberedStep], num_before: int = 0) -> list[types.RunStep]:
    """Optimizer steps, each with the passes before it; passes after the last are left out."""
    found: list[types.RunStep] = []
    passes: list[NumberedStep] = []
    for no, step in rows:
        if step.kind == JobKind.FORWARD_BACKWARD:
            passes.append((no, step))
        elif step.kind == JobKind.OPTIM_STEP:
            found.append(_build_run_step(num_before + len(found) + 1, passes, (no, step)))
            passes = []
        elif step.kind == JobKind.LOAD_WEIGHTS:
            # Loading drops the gradients that were gathered.
            passes = []
    return found


def _build_run_step(
    number: int, passes: Sequence[NumberedStep], optim_step: NumberedStep
) -> types.RunStep:
    update = build_update(passes, optim_step)
    told = _merge_metrics([step for _, step in passes]) | dict(optim_step[1].metrics or {})
    return types.RunStep(
        step=number,
        cursor=update.no,
        loss=update.loss,
        num_tokens=update.num_tokens,
        num_passes=update.num_passes,
        seconds=update.seconds,
        finished_at=datetime.fromtimestamp(update.finished_at, UTC),
        metrics={name: value for name, value in told.items() if math.isfinite(value)},
    )


def _merge_metrics(passes: Sequence[StepRecord]) -> dict[str, float]:
    """The metrics of some passes as one; the end of a name says how they are put together."""
    told = [step.metrics or {} for step in passes]
    weights = [step.num_tokens for step in passes]
    names = dict.fromkeys(name for metrics in told for name in metrics)
    return {name: _reduce_metric(name, told, weights) for name in names}


def _reduce_metric(
    name: str, step_metrics: Sequence[Mapping[str, float]], weights: Sequence[int]
) -> float:
    pairs = [
        (metrics[name], weight)
        for metrics, weight in zip(step_metrics, weights, strict=True)
        if name in metrics
    ]
    values = [value for value, _ in pairs]
    whole = sum(weight for _, weight in pairs)
    reduce = _REDUCTIONS.get(name.rpartition(":")[2])
    if reduce is not None:
        return reduce(values)
    return sum(v * w for v, w in pairs) / whole if whole else sum(values) / len(values)


#: With these a model's history begins, or begins again.
_START_KINDS = frozenset({JobKind.CREATE_MODEL, JobKind.LOAD_WEIGHTS})


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """What is known of one model's steps; it grows by `continued`."""

    updates: tuple[OptimizerUpdate, ...] = ()
    """Oldest first."""
    passes: tuple[tuple[int, StepRecord], ...] = ()
    """Whose gradients no optimizer step has applied yet."""
    recent: tuple[StepRecord, ...] = ()
    """The latest passes, for the speed."""
    first_no: int = 0
    last_no: int = 0
    is_whole: bool = True
    """Whether it reaches back to the model's beginning; old steps are forgotten in time."""
    finished_at: float = 0.0
    """When the last step ended; 0 if there is none."""
    num_dropped: int = 0
    """How many updates the store no longer has; they came before the others."""

    @property
    def metric(self) -> str:
        """The metric that its curve shows."""
        return primary_metric(self.updates[-1].metrics if self.updates else {})

    @cached_property
    def curve(self) -> CurveLayout | None:
        """One metric of its updates, by their place."""
        values = ((at, update.value_of(self.metric)) for at, update in self.numbered_updates())
        return layout_curve([Point(at, value) for at, value in values if value is not None])

    def numbered_updates(self) -> enumerate[OptimizerUpdate]:
        """The updates with their places, counted from the run's first."""
        return enumerate(self.updates, self.num_dropped + 1)

    @property
    def open_update(self) -> OptimizerUpdate | None:
        """The passes that wait for their optimizer step."""
        return build_update(self.passes, None) if self.passes else None

    @property
    def num_tokens(self) -> int:
        """Tokens of all passes."""
        closed = sum(update.num_tokens for update in self.updates)
        return closed + sum(step.num_tokens for _, step in self.passes)


def extend_history(history: RunHistory, steps: Sequence[tuple[int, StepRecord]]) -> RunHistory:
    """The history with the steps that followed it, oldest first."""
    if not steps:
        return history
    updates, passes = list(history.updates), list(history.passes)
    for no, step in steps:
        if step.kind == JobKind.FORWARD_BACKWARD:
            passes.append((no, step))
        elif step.kind == JobKind.OPTIM_STEP:
            updates.append(build_update(passes, (no, step)))
            passes = []
        elif step.kind in _START_KINDS:
            # Loading drops the gradients that were gathered.
            passes = []
    is_first = history.last_no == 0
    new = [step for _, step in steps if step.kind == JobKind.FORWARD_BACKWARD]
    return replace(
        history,
        updates=tuple(updates),
        passes=tuple(passes),
        recent=(*history.recent, *new)[-NUM_SPEED_PASSES:],
        first_no=steps[0][0] if is_first else history.first_no,
        last_no=steps[-1][0],
        is_whole=steps[0][1].kind in _START_KINDS if is_first else history.is_whole,
        finished_at=steps[-1][1].finished_at,
    )


def drop_before(history: RunHistory, oldest_no: int) -> RunHistory:
    """The history without what the store has forgotten, so that all processes tell the same."""
    if oldest_no <= history.first_no:
        return history
    kept = tuple(update for update in history.updates if update.no >= oldest_no)
    passes = tuple(one for one in history.passes if one[0] >= oldest_no)
    return replace(history, updates=kept, passes=passes, first_no=oldest_no, is_whole=False)
