"""How the house is doing: a few numbers about everything in it, cheap enough to ask often."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from tinkex.store.records import JobState
from tinkex.store.schema import jobs, processes, sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """The numbers."""

    num_waiting: int
    """Promises that nobody has taken."""
    num_running: int
    """Promises that the worker has."""
    oldest_waiting_at: float | None
    """When the promise that waits for the longest time was made."""
    num_sessions: int
    """Sessions that are neither finished nor expired."""
    num_workers: int
    """Workers that were seen lately."""
    store_bytes: int
    """What the database takes on disk."""


def collect_stats(db: sa.Connection, *, alive_since: float) -> StoreStats:
    """The numbers as they are now."""
    waiting, oldest = _count_jobs(db, JobState.QUEUED)
    running, _ = _count_jobs(db, JobState.RUNNING)
    return StoreStats(
        num_waiting=waiting,
        num_running=running,
        oldest_waiting_at=oldest,
        num_sessions=_count_rows(
            db, sessions, sessions.c.finished_at.is_(None), sessions.c.expired_at.is_(None)
        ),
        num_workers=_count_rows(
            db, processes, processes.c.role == "worker", processes.c.seen_at >= alive_since
        ),
        store_bytes=_database_bytes(db),
    )


def _count_jobs(db: sa.Connection, state: JobState) -> tuple[int, float | None]:
    found = db.execute(
        sa.select(sa.func.count(), sa.func.min(jobs.c.created_at)).where(jobs.c.state == state)
    ).one()
    return found[0], found[1]


def _count_rows(db: sa.Connection, table: sa.Table, *conditions: sa.ColumnElement[bool]) -> int:
    return db.scalar(sa.select(sa.func.count()).select_from(table).where(*conditions)) or 0


def _database_bytes(db: sa.Connection) -> int:
    if db.dialect.name != "sqlite":
        return db.scalar(sa.text("SELECT pg_database_size(current_database())")) or 0
    num_pages = db.exec_driver_sql("PRAGMA page_count").scalar_one()
    return int(num_pages * db.exec_driver_sql("PRAGMA page_size").scalar_one())
