"""What a page about one tenant shows besides its rows: the line of waiting work, counts, names."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import sqlalchemy as sa

from tinkex.store.records import JobState, TenantRecord
from tinkex.store.schema import jobs, steps, tenants


class OpenJobs(NamedTuple):
    """Promises of one kind that are not kept yet."""

    kind: str
    num_waiting: int
    num_running: int
    oldest_at: float
    """When the oldest of them was made."""


def open_jobs_by_kind(db: sa.Connection, tenant_id: str) -> list[OpenJobs]:
    """A tenant's promises that are not kept yet, by kind, the longest waiting first."""
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
    """How many operations of each of these models are queued and running, where there are any."""
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
    """Which of these sessions have samples that are not drawn yet."""
    query = sa.select(jobs.c.session_id).where(
        jobs.c.tenant_id == tenant_id,
        jobs.c.finished_at.is_(None),
        jobs.c.sampler_id.is_not(None),
        jobs.c.session_id.in_(session_ids),
    )
    return frozenset(db.scalars(query.distinct()))


def oldest_step_no(db: sa.Connection, run_id: str) -> int | None:
    """The number of the oldest step that is remembered of a model."""
    query = sa.select(sa.func.min(steps.c.no)).where(steps.c.run_id == run_id)
    found: int | None = db.scalar(query)
    return found


def find_tenant_by_name(db: sa.Connection, name: str) -> TenantRecord | None:
    """The tenant of this name, if there is one."""
    row = db.execute(sa.select(tenants).where(tenants.c.name == name)).one_or_none()
    return None if row is None else TenantRecord.from_row(row)
