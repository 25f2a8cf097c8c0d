"""Training history of a run: optimizer steps with their passes, loss, metrics and speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import isfinite

from tinkex import types
from tinkex.display import is_headline
from tinkex.jobs.job_types import TOTAL_WEIGHT_METRIC, JobKind
from tinkex.store import steps
from tinkex.store.database import Connection
from tinkex.store.records import RunRecord, StepRecord

LOSS_METRIC = "loss:sum"
#: Number of passes over which the speed is measured.
NUM_SPEED_PASSES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUpdate:
    """One optimizer step with the passes whose gradients it applied."""

    no: int
    """The number of its last step record in the store."""
    loss: float | None
    """Loss per token; None if no pass reported a loss."""
    num_tokens: int
    num_passes: int
    seconds: float
    """Duration from the start of its first pass to its end."""
    finished_at: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the client reported for it."""

    def value_of(self, metric: str) -> float | None:
        """A metric by name; None if it was not reported."""
        return self.loss if metric == "loss" else self.metrics.get(metric)


def build_update(
    passes: Sequence[tuple[int, StepRecord]], optim_step: tuple[int, StepRecord] | None
) -> OptimizerUpdate:
    """Build an update from passes and their optimizer step, which may not exist yet."""
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
    """The finite headline metrics of an optimizer step."""
    metrics = (step.metrics or {}) if step is not None else {}
    return {name: value for name, value in metrics.items() if is_headline(name) and isfinite(value)}


def loss_per_token(passes: Sequence[StepRecord]) -> float | None:
    """The mean loss per token of some passes, weighted by the tokens' loss weights if known."""
    reported = [(step.num_tokens, step.metrics) for step in passes if step.metrics is not None]
    with_loss = [(num, metrics) for num, metrics in reported if LOSS_METRIC in metrics]
    weight = sum(metrics.get(TOTAL_WEIGHT_METRIC, num) for num, metrics in with_loss)
    if weight <= 0:
        return None
    loss = sum(metrics[LOSS_METRIC] for _, metrics in with_loss) / weight
    # JSON has no NaN or infinity; the curve has a gap instead.
    return loss if isfinite(loss) else None


def tokens_per_second(passes: Sequence[StepRecord]) -> float | None:
    """The throughput of some passes, including the pauses between them."""
    if not passes:
        return None
    seconds = max(step.finished_at for step in passes) - min(step.started_at for step in passes)
    return sum(step.num_tokens for step in passes) / seconds if seconds > 0 else None


NumberedStep = tuple[int, StepRecord]
#: Reductions by the suffix of a metric's name; other metrics are averaged.
_REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "min": min,
    "max": max,
}


def list_newest_steps(db: Connection, run: RunRecord, limit: int) -> list[types.RunStep]:
    """The newest optimizer steps of a run, oldest first."""
    # One more, to know where the passes of the first one start.
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
    """Group step records into optimizer steps with their passes; drops trailing passes."""
    run_steps: list[types.RunStep] = []
    passes: list[NumberedStep] = []
    for no, step in rows:
        if step.kind == JobKind.FORWARD_BACKWARD:
            passes.append((no, step))
        elif step.kind == JobKind.OPTIM_STEP:
            run_steps.append(_build_run_step(num_before + len(run_steps) + 1, passes, (no, step)))
            passes = []
        elif step.kind == JobKind.LOAD_WEIGHTS:
            # Loading weights discards accumulated gradients.
            passes = []
    return run_steps


def _build_run_step(
    number: int, passes: Sequence[NumberedStep], optim_step: NumberedStep
) -> types.RunStep:
    update = build_update(passes, optim_step)
    metrics = _merge_metrics([step for _, step in passes]) | dict(optim_step[1].metrics or {})
    return types.RunStep(
        step=number,
        cursor=update.no,
        loss=update.loss,
        num_tokens=update.num_tokens,
        num_passes=update.num_passes,
        seconds=update.seconds,
        finished_at=datetime.fromtimestamp(update.finished_at, UTC),
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
    )


def _merge_metrics(passes: Sequence[StepRecord]) -> dict[str, float]:
    """Merge the metrics of some passes; the suffix of a name selects the reduction."""
    step_metrics = [step.metrics or {} for step in passes]
    weights = [step.num_tokens for step in passes]
    names = dict.fromkeys(name for metrics in step_metrics for name in metrics)
    return {name: _reduce_metric(name, step_metrics, weights) for name in names}


def _reduce_metric(
    name: str, step_metrics: Sequence[Mapping[str, float]], weights: Sequence[int]
) -> float:
    pairs = [
        (metrics[name], weight)
        for metrics, weight in zip(step_metrics, weights, strict=True)
        if name in metrics
    ]
    values = [value for value, _ in pairs]
    total = sum(weight for _, weight in pairs)
    reduce = _REDUCTIONS.get(name.rpartition(":")[2])
    if reduce is not None:
        return reduce(values)
    return sum(v * w for v, w in pairs) / total if total else sum(values) / len(values)


#: Jobs that start a model's history or restart it.
_START_KINDS = frozenset({JobKind.CREATE_MODEL, JobKind.LOAD_WEIGHTS})


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """The steps of one run; `extend_history` adds newer ones."""

    updates: tuple[OptimizerUpdate, ...] = ()
    """Oldest first."""
    passes: tuple[tuple[int, StepRecord], ...] = ()
    """Passes whose gradients no optimizer step has applied yet."""
    recent: tuple[StepRecord, ...] = ()
    """The latest passes, to measure the speed."""
    first_no: int = 0
    last_no: int = 0
    is_whole: bool = True
    """Whether it starts with the run's first step; the store deletes old steps over time."""
    finished_at: float = 0.0
    """When the last step finished; 0 if there is none."""
    num_dropped: int = 0
    """Number of older updates that the store has deleted."""

    def numbered_updates(self) -> enumerate[OptimizerUpdate]:
        """The updates with their step numbers, counted from the run's first step."""
        return enumerate(self.updates, self.num_dropped + 1)

    @property
    def open_update(self) -> OptimizerUpdate | None:
        """The passes since the last optimizer step, as an unfinished update."""
        return build_update(self.passes, None) if self.passes else None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all passes."""
        closed = sum(update.num_tokens for update in self.updates)
        return closed + sum(step.num_tokens for _, step in self.passes)


def extend_history(history: RunHistory, steps: Sequence[tuple[int, StepRecord]]) -> RunHistory:
    """Return the history extended by newer steps, oldest first."""
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
            # Loading weights discards accumulated gradients.
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
    """Return the history without deleted steps, so that all API processes show the same."""
    if oldest_no <= history.first_no:
        return history
    updates = tuple(update for update in history.updates if update.no >= oldest_no)
    passes = tuple((no, step) for no, step in history.passes if no >= oldest_no)
    return replace(history, updates=updates, passes=passes, first_no=oldest_no, is_whole=False)
