"""Sampling sessions and the completions of their samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from tinkex.store.dialects import insert_or_ignore
from tinkex.store.records import SamplerRecord
from tinkex.store.schema import completions, samplers

_IS_UNTOUCHED = sa.and_(
    samplers.c.id == sa.bindparam("touched"), samplers.c.used_at <= sa.bindparam("before")
)
_TOUCH = sa.update(samplers).where(_IS_UNTOUCHED)
#: Does not wait: another process that holds the row is recording the same.
_TOUCH_UNLOCKED = sa.update(samplers).where(
    samplers.c.id.in_(
        sa.select(samplers.c.id).where(_IS_UNTOUCHED).with_for_update(skip_locked=True)
    )
)
_FIND = sa.select(samplers).where(samplers.c.id == sa.bindparam("sampler_id"))


def insert(db: sa.Connection, sampler: SamplerRecord) -> None:
    """Store a sampling session, unless its id exists."""
    db.execute(insert_or_ignore(db, samplers, "id"), sampler.to_columns())


def find(db: sa.Connection, sampler_id: str) -> SamplerRecord | None:
    """Return a sampling session by id."""
    row = db.execute(_FIND, {"sampler_id": sampler_id}).one_or_none()
    return None if row is None else SamplerRecord.from_row(row)


def touch(db: sa.Connection, sampler_id: str, now: float, seconds: float = 0.0) -> None:
    """Record that a sample was requested, at most once per `seconds`."""
    statement = _TOUCH if db.dialect.name == "sqlite" else _TOUCH_UNLOCKED
    db.execute(statement, {"touched": sampler_id, "used_at": now, "before": now - seconds})


def list_by_session(db: sa.Connection, session_id: str) -> list[SamplerRecord]:
    """Return a session's sampling sessions, oldest first."""
    query = sa.select(samplers).where(samplers.c.session_id == session_id)
    ordered = query.order_by(samplers.c.created_at, samplers.c.id)
    return [SamplerRecord.from_row(row) for row in db.execute(ordered)]


def add_clone(db: sa.Connection, sampler_id: str) -> int:
    """Return the number of a new clone, from 1; the sampling session must exist."""
    statement = (
        sa.update(samplers)
        .where(samplers.c.id == sampler_id)
        .values(num_clones=samplers.c.num_clones + 1)
    )
    return int(db.execute(statement.returning(samplers.c.num_clones)).scalar_one())


class SampleCompletion(NamedTuple):
    """A finished sample; `result_bytes` is None if it failed."""

    job_id: str
    result_bytes: int | None


def list_completions(
    db: sa.Connection, sampler_id: str, clone: int, cursor: int, limit: int
) -> tuple[list[SampleCompletion], int]:
    """Return completions after the cursor, in order, and the next cursor."""
    query = (
        sa.select(completions.c.no, completions.c.job_id, completions.c.result_bytes)
        .where(
            completions.c.sampler_id == sampler_id,
            completions.c.clone == clone,
            completions.c.no > cursor,
        )
        .order_by(completions.c.no)
        .limit(limit)
    )
    rows = db.execute(query).all()
    return [SampleCompletion(row.job_id, row.result_bytes) for row in rows], (
        rows[-1].no if rows else cursor
    )


def delete_completions(db: sa.Connection, sampler_id: str, job_ids: Sequence[str]) -> None:
    """Delete completions that their client has received."""
    db.execute(
        sa.delete(completions).where(
            completions.c.sampler_id == sampler_id, completions.c.job_id.in_(job_ids)
        )
    )
