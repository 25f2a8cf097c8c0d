"""Statistics of the store for metrics and the dashboard; cheap enough to poll."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa

from tinkex.store import groups
from tinkex.store.coordination import group_lease
from tinkex.store.records import GroupRecord, JobState
from tinkex.store.schema import jobs, leases, processes, sessions, steps


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Statistics of the whole store."""

    num_waiting: int
    """Queued jobs."""
    num_running: int
    """Running jobs."""
    oldest_waiting_at: float | None
    """When the oldest queued job was submitted."""
    num_sessions: int
    """Sessions that are neither finished nor expired."""
    num_workers: int
    """Workers with a recent heartbeat."""
    store_bytes: int
    """Size of the database on disk."""
    queued_seconds: Mapping[str, float]
    """Estimated duration of the queued work, by worker group."""
    num_models: Mapping[str, float]
    """Models that can be trained, by worker group."""
    drift_mean: Mapping[str, float]
    """Mean difference of sampled log-probabilities from the trainer's, by base model."""
    drift_max: Mapping[str, float]
    """The largest of these differences, by base model."""
    busy: Mapping[str, float]
    """Fraction of time that the engine was busy, by worker group."""
    num_moves: Mapping[str, float]
    """How often a worker group was given work of others."""
    num_restarts: Mapping[str, float]
    """How often the worker of a group was started again."""


def collect_stats(db: sa.Connection, *, alive_since: float) -> StoreStats:
    """Collect the current statistics."""
    waiting, oldest = _count_jobs(db, JobState.QUEUED)
    running, _ = _count_jobs(db, JobState.RUNNING)
    current = groups.list_current(db)
    loads = {group.id: group.load for group in current}
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
        queued_seconds={name: load.get("queued_seconds", 0.0) for name, load in loads.items()},
        num_models={name: load.get("num_runs", 0.0) for name, load in loads.items()},
        drift_mean=_max_by_model(current, "drift_mean"),
        drift_max=_max_by_model(current, "drift_max"),
        busy={name: load.get("busy", 0.0) for name, load in loads.items()},
        num_moves={group.id: float(group.num_moves) for group in current},
        num_restarts=_count_restarts(db, list(loads)),
    )


def _max_by_model(current: Sequence[GroupRecord], name: str) -> dict[str, float]:
    """Return the largest reported number of the groups that serve a base model."""
    largest: dict[str, float] = {}
    for group in current:
        for model in group.base_models if name in group.load else ():
            base_model = str(model["name"])
            largest[base_model] = max(largest.get(base_model, 0.0), group.load[name])
    return largest


def _count_restarts(db: sa.Connection, group_ids: Sequence[str]) -> dict[str, float]:
    """Return how often workers were started again: each start raises the epoch of the lease."""
    names = {group_lease(group_id): group_id for group_id in group_ids}
    query = sa.select(leases.c.name, leases.c.epoch).where(leases.c.name.in_(list(names)))
    return {names[name]: float(max(epoch - 1, 0)) for name, epoch in db.execute(query)}


def _count_jobs(db: sa.Connection, state: JobState) -> tuple[int, float | None]:
    count, oldest = db.execute(
        sa.select(sa.func.count(), sa.func.min(jobs.c.created_at)).where(jobs.c.state == state)
    ).one()
    return count, oldest


def _count_rows(db: sa.Connection, table: sa.Table, *conditions: sa.ColumnElement[bool]) -> int:
    return db.scalar(sa.select(sa.func.count()).select_from(table).where(*conditions)) or 0


def _database_bytes(db: sa.Connection) -> int:
    if db.dialect.name != "sqlite":
        return db.scalar(sa.text("SELECT pg_database_size(current_database())")) or 0
    num_pages = db.exec_driver_sql("PRAGMA page_count").scalar_one()
    return int(num_pages * db.exec_driver_sql("PRAGMA page_size").scalar_one())


class OpenJobs(NamedTuple):
    """Unfinished jobs of one kind."""

    kind: str
    num_waiting: int
    num_running: int
    oldest_at: float
    """When the oldest of them was submitted."""


def open_jobs_by_kind(db: sa.Connection, tenant_id: str) -> list[OpenJobs]:
    """Return a tenant's unfinished jobs by kind, longest waiting first."""
    is_queued = sa.case((jobs.c.state == JobState.QUEUED, 1), else_=0)
    num_waiting = sa.func.sum(is_queued)
    oldest_at = sa.func.min(jobs.c.created_at)
    query = (
        sa.select(jobs.c.kind, num_waiting, sa.func.count(), oldest_at)
        .where(jobs.c.tenant_id == tenant_id, jobs.c.finished_at.is_(None))
        .group_by(jobs.c.kind)
        .order_by(oldest_at, jobs.c.kind)
    )
    return [
        OpenJobs(kind, int(waiting), total - int(waiting), oldest)
        for kind, waiting, total, oldest in db.execute(query)
    ]


def open_jobs_by_run(
    db: sa.Connection, tenant_id: str, run_ids: Collection[str]
) -> dict[str, tuple[int, int]]:
    """Return (queued, running) per model; models without unfinished jobs are omitted."""
    is_queued = sa.case((jobs.c.state == JobState.QUEUED, 1), else_=0)
    query = (
        sa.select(jobs.c.run_id, sa.func.sum(is_queued), sa.func.count())
        .where(
            jobs.c.tenant_id == tenant_id,
            jobs.c.finished_at.is_(None),
            jobs.c.run_id.in_(run_ids),
        )
        .group_by(jobs.c.run_id)
    )
    return {
        run_id: (int(queued), total - int(queued)) for run_id, queued, total in db.execute(query)
    }


def sessions_with_open_samples(
    db: sa.Connection, tenant_id: str, session_ids: Collection[str]
) -> frozenset[str]:
    """Return which of these sessions have unfinished samples."""
    query = sa.select(jobs.c.session_id).where(
        jobs.c.tenant_id == tenant_id,
        jobs.c.finished_at.is_(None),
        jobs.c.sampler_id.is_not(None),
        jobs.c.session_id.in_(session_ids),
    )
    return frozenset(db.scalars(query.distinct()))


def oldest_step_no(db: sa.Connection, run_id: str) -> int | None:
    """Return the number of a model's oldest stored step."""
    query = sa.select(sa.func.min(steps.c.no)).where(steps.c.run_id == run_id)
    number: int | None = db.scalar(query)
    return number


def list_executed_operations(db: sa.Connection) -> list[tuple[str, int | None, str]]:
    """Return (run, seq_id, kind) of the finished operations of all runs, in order of execution."""
    query = (
        sa.select(jobs.c.run_id, jobs.c.position, jobs.c.kind)
        .where(jobs.c.run_id.is_not(None), jobs.c.finished_at.is_not(None))
        .where(jobs.c.kind.not_in(("create_model", "unload_model")))
        .order_by(jobs.c.started_at, jobs.c.position)
    )
    return [(run_id, position, kind) for run_id, position, kind in db.execute(query)]
