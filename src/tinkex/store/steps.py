"""Executed operations with times and metrics, for loss curves and traces."""

from __future__ import annotations

import math
from collections.abc import Mapping

import sqlalchemy as sa

from tinkex.store.records import StepRecord
from tinkex.store.schema import runs, steps

#: The kind of step that `runs.num_steps` counts.
OPTIM_STEP = "optim_step"

_INSERT = sa.insert(steps)
_INCREMENT_NUM_STEPS = (
    sa.update(runs)
    .where(runs.c.id == sa.bindparam("counted"))
    .values(num_steps=runs.c.num_steps + 1)
)


def insert(db: sa.Connection, step: StepRecord) -> None:
    """Store a step and count it if it is an optimizer step."""
    db.execute(_INSERT, step.to_columns() | {"metrics": _as_json(step.metrics)})
    if step.kind == OPTIM_STEP and step.run_id is not None:
        db.execute(_INCREMENT_NUM_STEPS, {"counted": step.run_id})


def list_by_run(
    db: sa.Connection, run_id: str, *, limit: int, after_no: int = 0
) -> list[tuple[int, StepRecord]]:
    """Return a model's newest steps after a number, oldest first, with their numbers."""
    return _list_newest(db, sa.and_(steps.c.run_id == run_id, steps.c.no > after_no), limit)


def add_metrics(
    db: sa.Connection, run_id: str, position: int, metrics: Mapping[str, float]
) -> bool:
    """Add metrics to the optimizer step at a position of a run; returns False if missing."""
    row = db.execute(
        sa.select(steps.c.no, steps.c.metrics)
        .where(_is_kind(run_id, OPTIM_STEP), steps.c.position == position)
        .order_by(steps.c.no.desc())
        .limit(1)
        .with_for_update()
    ).one_or_none()
    if row is None:
        return False
    merged = (row.metrics or {}) | (_as_json(metrics) or {})
    db.execute(sa.update(steps).where(steps.c.no == row.no).values(metrics=merged))
    return True


def first_numbers_of_kind(
    db: sa.Connection, run_id: str, kind: str, *, after_no: int, limit: int
) -> list[int]:
    """Return the numbers of a model's first steps of a kind after a number, in order."""
    query = sa.select(steps.c.no).where(_is_kind(run_id, kind), steps.c.no > after_no)
    return list(db.scalars(query.order_by(steps.c.no).limit(limit)))


def last_numbers_of_kind(db: sa.Connection, run_id: str, kind: str, *, limit: int) -> list[int]:
    """Return the numbers of a model's newest steps of a kind, in order."""
    query = sa.select(steps.c.no).where(_is_kind(run_id, kind))
    return list(db.scalars(query.order_by(steps.c.no.desc()).limit(limit)))[::-1]


def count_after(db: sa.Connection, run_id: str, kind: str, after_no: int) -> int:
    """Count a model's steps of a kind after a number."""
    query = sa.select(sa.func.count()).where(_is_kind(run_id, kind), steps.c.no > after_no)
    return db.scalar(query) or 0


def list_between(
    db: sa.Connection, run_id: str, after_no: int, last_no: int
) -> list[tuple[int, StepRecord]]:
    """Return a model's steps in (after_no, last_no], oldest first, with their numbers."""
    is_inside = sa.and_(steps.c.run_id == run_id, steps.c.no > after_no, steps.c.no <= last_no)
    return [
        _numbered_step(row) for row in db.execute(sa.select(steps).where(is_inside).order_by("no"))
    ]


def _is_kind(run_id: str, kind: str) -> sa.ColumnElement[bool]:
    return sa.and_(steps.c.run_id == run_id, steps.c.kind == kind)


def list_by_session(db: sa.Connection, session_id: str, *, limit: int) -> list[StepRecord]:
    """Return the newest steps of a session, oldest first."""
    return [step for _, step in _list_newest(db, steps.c.session_id == session_id, limit)]


def _list_newest(
    db: sa.Connection, condition: sa.ColumnElement[bool], limit: int
) -> list[tuple[int, StepRecord]]:
    rows = db.execute(sa.select(steps).where(condition).order_by(steps.c.no.desc()).limit(limit))
    return [_numbered_step(row) for row in reversed(rows.all())]


def _numbered_step(row: sa.Row[tuple[object, ...]]) -> tuple[int, StepRecord]:
    values = dict(row._mapping)
    no = values.pop("no")
    return no, StepRecord(**values | {"metrics": _from_json(row.metrics)})


def _as_json(metrics: Mapping[str, float] | None) -> dict[str, float | str] | None:
    """Convert metrics to JSON values; infinity and NaN, which JSON lacks, become strings."""
    if metrics is None:
        return None
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def _from_json(metrics: Mapping[str, float | str] | None) -> dict[str, float] | None:
    if metrics is None:
        return None
    return {name: float(value) for name, value in metrics.items()}
