"""Delete expired rows in small transactions, so that the store does not grow with time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa

from tinkex.errors import ConfigError
from tinkex.store import blobs
from tinkex.store.accounting import HOUR_SECONDS
from tinkex.store.database import Database
from tinkex.store.records import RunState
from tinkex.store.schema import (
    audit,
    checkpoints,
    completions,
    jobs,
    repeats,
    runs,
    samplers,
    sessions,
    steps,
    tenants,
    usage,
)

T = TypeVar("T")

_DAY_SECONDS = 86_400.0
#: Payload and result bytes deleted per sweep; more would block other writers.
_MAX_BYTES = 64 * 2**20
#: SQLite pages freed per transaction.
_PAGES_PER_TRANSACTION = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """How long rows are kept after their object has ended."""

    fetched_seconds: float = 600.0
    """Fetched results; a client may lose the response and fetch again."""
    max_fetched: int = 10_000
    """Maximum number of fetched results."""
    unfetched_seconds: float = _DAY_SECONDS
    """Unfetched results."""
    steps_per_session: int = 10_000
    """Maximum number of steps per session; the newest are kept."""
    steps_seconds: float = 90 * _DAY_SECONDS
    """Steps."""
    completions_seconds: float = _DAY_SECONDS
    """Completions that their client did not fetch."""
    repeats_seconds: float = _DAY_SECONDS
    """Responses of idempotency keys."""
    audit_seconds: float = 400 * _DAY_SECONDS
    """Audit entries."""
    samplers_seconds: float = 30 * _DAY_SECONDS
    """Sampling sessions, after their session is over."""
    sessions_seconds: float = 400 * _DAY_SECONDS
    """Ended sessions and their runs, unless they have a checkpoint."""
    usage_seconds: float = 400 * _DAY_SECONDS
    """Hourly usage."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """Numbers of deleted rows."""

    num_jobs: int = 0
    num_results: int = 0
    """Results deleted from jobs that are kept for replay."""
    num_completions: int = 0
    num_steps: int = 0
    num_repeats: int = 0
    num_audit: int = 0
    has_more: bool = False
    """Whether more rows can be deleted now."""


def sweep(db: sa.Connection, policy: RetentionPolicy, now: float, limit: int = 2000) -> SweepResult:
    """Delete expired rows, at most about `limit` of each kind.

    Unfinished jobs stay. Jobs that changed a run and are not in its snapshot lose only their
    results: they are replayed after a crash.
    """
    num_results, more_results = _clear_results(db, policy, now, limit)
    num_jobs, more_jobs = _delete_jobs(db, policy, now, limit)
    num_completions = _delete_oldest(db, completions, now - policy.completions_seconds, limit)
    num_repeats = _delete_oldest(db, repeats, now - policy.repeats_seconds, limit)
    num_steps = _trim_steps(db, policy.steps_per_session, limit)
    num_steps += _delete_leading(db, steps, steps.c.finished_at, now - policy.steps_seconds, limit)
    num_audit = _delete_leading(db, audit, audit.c.at, now - policy.audit_seconds, limit)
    counts = (num_completions, num_repeats, num_steps, num_audit)
    return SweepResult(
        num_jobs=num_jobs,
        num_results=num_results,
        num_completions=num_completions,
        num_steps=num_steps,
        num_repeats=num_repeats,
        num_audit=num_audit,
        has_more=more_results or more_jobs or any(count >= limit for count in counts),
    )


# --- jobs ------------------------------------------------------------------------------------
_SIZE = (jobs.c.payload_bytes + jobs.c.result_bytes).label("size")


def _is_needed_for_replay() -> sa.ColumnElement[bool]:
    """Return a condition: the job would be replayed after a crash."""
    behind = sa.exists().where(runs.c.id == jobs.c.run_id, jobs.c.applied > runs.c.snapshot_applied)
    return sa.and_(jobs.c.applied.is_not(None), behind)


def _delete_jobs(
    db: sa.Connection, policy: RetentionPolicy, now: float, limit: int
) -> tuple[int, bool]:
    is_deletable = ~_is_needed_for_replay()
    expired = _list_expired(db, policy, now, limit, is_deletable)
    surplus = _count_surplus(db, policy.max_fetched, is_deletable)
    if surplus > 0:
        oldest = _ids_with_sizes(db, _oldest_fetched(is_deletable).limit(min(surplus, limit)))
        expired = list(dict(expired + oldest).items())
    ids = take_within_limits(expired, limit, _MAX_BYTES)
    _update_forgotten_seq(db, ids)
    db.execute(sa.delete(completions).where(completions.c.job_id.in_(ids)))
    blobs.mark_unused(db, blobs.select_payloads(jobs.c.id.in_(ids)))
    db.execute(sa.delete(jobs).where(jobs.c.id.in_(ids)))
    return len(ids), len(ids) < len(expired) or len(ids) >= limit


def _update_forgotten_seq(db: sa.Connection, job_ids: list[str]) -> None:
    """Record the highest deleted sequence number per run: deleted keys cannot detect repeats."""
    query = (
        sa.select(jobs.c.run_id, sa.func.max(jobs.c.position))
        .where(jobs.c.id.in_(job_ids), jobs.c.run_id.is_not(None))
        .group_by(jobs.c.run_id)
    )
    for run_id, position in db.execute(query).all():
        db.execute(
            sa.update(runs)
            .where(runs.c.id == run_id, runs.c.forgotten_seq < position)
            .values(forgotten_seq=position)
        )


def _clear_results(
    db: sa.Connection, policy: RetentionPolicy, now: float, limit: int
) -> tuple[int, bool]:
    is_wanted = sa.and_(jobs.c.result.is_not(None), _is_needed_for_replay())
    ripe = _list_expired(db, policy, now, limit, is_wanted)
    ids = take_within_limits(ripe, limit, _MAX_BYTES)
    db.execute(sa.update(jobs).where(jobs.c.id.in_(ids)).values(result=None))
    return len(ids), len(ids) < len(ripe) or len(ids) >= limit


def _list_expired(
    db: sa.Connection,
    policy: RetentionPolicy,
    now: float,
    limit: int,
    is_wanted: sa.ColumnElement[bool],
) -> list[tuple[str, int]]:
    """Jobs of a kind whose outcome is old enough to be forgotten, with their sizes."""
    fetched = _oldest_fetched(is_wanted).where(jobs.c.fetched_at <= now - policy.fetched_seconds)
    unfetched = (
        sa.select(jobs.c.id, _SIZE)
        .where(
            jobs.c.fetched_at.is_(None),
            jobs.c.finished_at <= now - policy.unfetched_seconds,
            is_wanted,
        )
        .order_by(jobs.c.finished_at)
    )
    return _ids_with_sizes(db, fetched.limit(limit)) + _ids_with_sizes(db, unfetched.limit(limit))


def _oldest_fetched(is_wanted: sa.ColumnElement[bool]) -> sa.Select[str, int]:
    query = sa.select(jobs.c.id, _SIZE).where(jobs.c.fetched_at.is_not(None), is_wanted)
    return query.order_by(jobs.c.fetched_at, jobs.c.no)


def _ids_with_sizes(db: sa.Connection, query: sa.Select[str, int]) -> list[tuple[str, int]]:
    return [(row[0], row[1]) for row in db.execute(query)]


def _count_surplus(db: sa.Connection, num_kept: int, is_wanted: sa.ColumnElement[bool]) -> int:
    fetched = sa.select(sa.func.count()).where(jobs.c.fetched_at.is_not(None))
    # The index alone answers this in almost all cases.
    if (db.scalar(fetched) or 0) <= num_kept:
        return 0
    return (db.scalar(fetched.where(is_wanted)) or 0) - num_kept


def take_within_limits(rows: Iterable[tuple[str, int]], max_rows: int, max_bytes: int) -> list[str]:
    """Return the first rows within both limits, but at least one."""
    chosen: list[str] = []
    total = 0
    for row_id, size in rows:
        total += size
        if chosen and (len(chosen) >= max_rows or total > max_bytes):
            break
        chosen.append(row_id)
    return chosen


# --- other tables ----------------------------------------------------------------------------
def _delete_oldest(db: sa.Connection, table: sa.Table, before: float, limit: int) -> int:
    """Delete the oldest rows of a table with a `created_at` column."""
    keys = list(table.primary_key)
    oldest = sa.select(*keys).where(table.c.created_at <= before)
    chosen = oldest.order_by(table.c.created_at).limit(limit).subquery()
    is_chosen = sa.tuple_(*keys).in_(sa.select(chosen))
    return db.execute(sa.delete(table).where(is_chosen)).rowcount


def _trim_steps(db: sa.Connection, num_kept: int, limit: int) -> int:
    """Trim recently active sessions; only those can have exceeded the limit."""
    recent = sa.select(steps.c.session_id).order_by(steps.c.no.desc()).limit(limit).subquery()
    removed = 0
    for session_id in db.scalars(sa.select(recent.c.session_id).distinct()).all():
        if removed >= limit:
            break
        removed += _trim_session_steps(db, session_id, num_kept, limit - removed)
    return removed


def _trim_session_steps(db: sa.Connection, session_id: str, num_kept: int, limit: int) -> int:
    of_session = sa.select(steps.c.no).where(steps.c.session_id == session_id)
    newest_surplus = db.scalar(of_session.order_by(steps.c.no.desc()).offset(num_kept).limit(1))
    if newest_surplus is None:
        return 0
    surplus = of_session.where(steps.c.no <= newest_surplus).order_by(steps.c.no).limit(limit)
    is_surplus = steps.c.no.in_(sa.select(surplus.subquery()))
    return db.execute(sa.delete(steps).where(is_surplus)).rowcount


def _delete_leading(
    db: sa.Connection, table: sa.Table, at: sa.Column[float], before: float, limit: int
) -> int:
    """Delete old rows of a table that is numbered by time, so that old rows come first."""
    first = sa.select(table.c.no, at).order_by(table.c.no).limit(limit)
    old = [no for no, when in db.execute(first) if when <= before]
    return db.execute(sa.delete(table).where(table.c.no.in_(old))).rowcount


def vacuum(database: Database) -> int:
    """Return free pages of SQLite to the disk; returns their number. PostgreSQL needs no help."""
    if not database.is_sqlite:
        return 0
    freed = 0
    while num_pages := database.write(_free_pages):
        freed += num_pages
    # The file shrinks when the log is copied into it; PASSIVE never blocks.
    database.read(lambda db: db.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)").all())
    return freed


def _free_pages(db: sa.Connection) -> int:
    def count() -> int:
        return int(db.exec_driver_sql("PRAGMA freelist_count").scalar_one())

    before = count()
    # One at a time: SQLite frees one page per fetched row, and Python's driver does not fetch rows
    # without columns.
    for _ in range(min(before, _PAGES_PER_TRANSACTION)):
        db.exec_driver_sql("PRAGMA incremental_vacuum(1)")
    return before - count()


# --- rows that are kept for months: sampling sessions, sessions with their runs, hourly usage ---
# Read transactions find old rows; each write transaction deletes few of them, so that other writers
# never wait long.
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
