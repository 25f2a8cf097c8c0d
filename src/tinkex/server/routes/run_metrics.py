"""How a training run goes: its optimizer steps in pages, its speed and its queue."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tinkex import types
from tinkex.jobs.kinds import Kind
from tinkex.server.call import Call, Handler, Services
from tinkex.server.dashboard.progress import (
    SPEED_PASSES,
    History,
    continued,
    tokens_per_second,
    update_of,
)
from tinkex.server.dashboard.reading import status_of
from tinkex.server.ownership import run_of, session_of
from tinkex.server.transactions import read
from tinkex.store import overview, steps
from tinkex.store.database import Connection
from tinkex.store.records import Step

DEFAULT_LIMIT = 100
#: Steps from which the newest loss and the speed are read.
_LATEST_STEPS = 3 * SPEED_PASSES

Numbered = tuple[int, Step]
#: By the end of a metric's name; all others are means.
_REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "min": min,
    "max": max,
}


async def get_run_metrics(services: Services, call: Call[Any]) -> types.RunMetricsResponse:
    """The newest steps of a run, or the first ones after a cursor."""
    run_id = call.ids["training_run_id"]
    limit = int(call.query.get("limit", DEFAULT_LIMIT))
    after = int(call.query["after"]) if "after" in call.query else None

    def look(db: Connection) -> types.RunMetricsResponse:
        run = run_of(db, call.tenant_id, run_id, "training run")
        session = session_of(db, call.tenant_id, run.session_id)
        latest = continued(History(), steps.of_run(db, run_id, limit=_LATEST_STEPS))
        waiting, running = overview.open_work_of_run(db, run_id)
        oldest_no = overview.oldest_step(db, run_id) or 0
        oldest = steps.between(db, run_id, oldest_no - 1, oldest_no)
        return types.RunMetricsResponse(
            training_run_id=run_id,
            steps=_page(db, run_id, after, limit),
            num_steps=overview.count_steps(db, [run_id], Kind.OPTIM_STEP).get(run_id, 0),
            is_whole=continued(History(), oldest).is_whole,
            status=status_of(session),
            loss=latest.loss,
            tokens_per_second=tokens_per_second(latest.recent),
            num_waiting=waiting,
            num_running=running,
        )

    return await read(services, look)


def _page(db: Connection, run_id: str, after: int | None, limit: int) -> list[types.RunStep]:
    if after is None:
        # One more, to know where the first one begins.
        ends = steps.last_closed_by(db, run_id, Kind.OPTIM_STEP, limit=limit + 1)
        after, ends = (ends[0], ends[1:]) if len(ends) > limit else (0, ends)
    else:
        ends = steps.closed_by(db, run_id, Kind.OPTIM_STEP, after_no=after, limit=limit)
    if not ends:
        return []
    num_before = steps.count_until(db, run_id, Kind.OPTIM_STEP, after)
    return fold(steps.between(db, run_id, after, ends[-1]), num_before)


def fold(rows: Sequence[Numbered], num_before: int = 0) -> list[types.RunStep]:
    """Optimizer steps, each with the passes before it; passes after the last are left out."""
    found: list[types.RunStep] = []
    passes: list[Numbered] = []
    for no, step in rows:
        if step.kind == Kind.FORWARD_BACKWARD:
            passes.append((no, step))
        elif step.kind == Kind.OPTIM_STEP:
            found.append(_run_step(num_before + len(found) + 1, passes, (no, step)))
            passes = []
        elif step.kind == Kind.LOAD_WEIGHTS:
            # Loading drops the gradients that were gathered.
            passes = []
    return found


def _run_step(place: int, passes: Sequence[Numbered], end: Numbered) -> types.RunStep:
    update = update_of(passes, end)
    told = _merged([step for _, step in passes]) | dict(end[1].metrics or {})
    return types.RunStep(
        step=place,
        cursor=update.no,
        loss=update.loss,
        num_tokens=update.num_tokens,
        num_passes=update.num_passes,
        seconds=update.seconds,
        finished_at=datetime.fromtimestamp(update.finished_at, UTC),
        metrics={name: value for name, value in told.items() if math.isfinite(value)},
    )


def _merged(passes: Sequence[Step]) -> dict[str, float]:
    """The metrics of some passes as one; the end of a name says how they are put together."""
    told = [step.metrics or {} for step in passes]
    weights = [step.num_tokens for step in passes]
    names = dict.fromkeys(name for metrics in told for name in metrics)
    return {name: _reduced(name, told, weights) for name in names}


def _reduced(name: str, told: Sequence[Mapping[str, float]], weights: Sequence[int]) -> float:
    pairs = [
        (metrics[name], weight)
        for metrics, weight in zip(told, weights, strict=True)
        if name in metrics
    ]
    values = [value for value, _ in pairs]
    whole = sum(weight for _, weight in pairs)
    reduce = _REDUCTIONS.get(name.rpartition(":")[2])
    if reduce is not None:
        return reduce(values)
    return sum(v * w for v, w in pairs) / whole if whole else sum(values) / len(values)


ROUTES: dict[str, Handler] = {"get_run_metrics": get_run_metrics}
