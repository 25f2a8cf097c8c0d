"""Optimizer steps of a run, made from the operations that the store remembers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from tinkex import types
from tinkex.jobs.kinds import JobKind
from tinkex.server.updates import build_update
from tinkex.store import steps
from tinkex.store.database import Connection
from tinkex.store.records import RunRecord, StepRecord

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
