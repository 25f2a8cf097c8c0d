"""Delete rows that are kept for months: sampling sessions, sessions with their runs, hourly usage.

Read transactions find old rows; each write transaction deletes few of them, so that other writers
never wait long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa

from tinkex.store.accounting import HOUR_SECONDS
from tinkex.store.database import Database
from tinkex.store.records import RunState
from tinkex.store.retention import RetentionPolicy
from tinkex.store.schema import checkpoints, runs, samplers, sessions, tenants, usage

T = TypeVar("T")
#: Rows deleted per transaction.
_MAX_ROWS = 500
#: Hours of usage deleted per transaction; each has a row per session, model and kind.
_MAX_HOURS = 24


def delete_old(database: Database, policy: RetentionPolicy, now: float) -> None:
    """Delete everything older than the policy allows."""
    old_samplers = _old_samplers(now - policy.samplers_seconds)
    _delete_in_batches(
        database, old_samplers, lambda db, ids: _delete_where_in(db, samplers.c.id, ids)
    )
    _delete_in_batches(database, _old_sessions(now - policy.sessions_seconds), _delete_sessions)
    before = math.floor((now - policy.usage_seconds) / HOUR_SECONDS)
    for tenant_id in database.read(lambda db: list(db.scalars(sa.select(tenants.c.id)))):
        is_old = sa.and_(usage.c.tenant_id == tenant_id, usage.c.hour < before)
        hours = sa.select(usage.c.hour).where(is_old).distinct()
        _delete_in_batches(database, hours, _delete_usage_hours(tenant_id), _MAX_HOURS)


def _delete_in_batches(
    database: Database,
    query: sa.Select[T],
    delete: Callable[[sa.Connection, list[T]], None],
    limit: int = _MAX_ROWS,
) -> None:
    """Delete the rows that a query selects, in batches."""
    while rows := database.read(lambda db: list(db.scalars(query.limit(limit)))):
        database.write(_bind_rows(delete, rows))


def _bind_rows(
    delete: Callable[[sa.Connection, list[T]], None], rows: list[T]
) -> Callable[[sa.Connection], None]:
    return lambda db: delete(db, rows)


def _delete_where_in(db: sa.Connection, column: sa.Column[str], values: list[str]) -> None:
    db.execute(sa.delete(column.table).where(column.in_(values)))


def _ended_at() -> sa.ColumnElement[float]:
    return sa.func.coalesce(sessions.c.finished_at, sessions.c.expired_at)


def _old_samplers(before: float) -> sa.Select[str]:
    query = sa.select(samplers.c.id).join(sessions, sessions.c.id == samplers.c.session_id)
    return query.where(_ended_at() <= before)


def _old_sessions(before: float) -> sa.Select[str]:
    """Select ended sessions without checkpoints and without usable models."""
    has_checkpoint = sa.exists().where(checkpoints.c.session_id == sessions.c.id)
    has_model = sa.exists().where(
        runs.c.session_id == sessions.c.id, runs.c.state.in_([RunState.CREATING, RunState.READY])
    )
    query = sa.select(sessions.c.id).where(_ended_at() <= before)
    return query.where(~has_checkpoint.correlate(sessions), ~has_model.correlate(sessions))


def _delete_sessions(db: sa.Connection, session_ids: list[str]) -> None:
    for column in (samplers.c.session_id, runs.c.session_id, sessions.c.id):
        _delete_where_in(db, column, session_ids)


def _delete_usage_hours(tenant_id: str) -> Callable[[sa.Connection, list[int]], None]:
    def delete(db: sa.Connection, hours: list[int]) -> None:
        is_old = sa.and_(usage.c.tenant_id == tenant_id, usage.c.hour.in_(hours))
        db.execute(sa.delete(usage).where(is_old))

    return delete
