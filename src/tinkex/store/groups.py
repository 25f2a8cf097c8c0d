"""Worker groups: registration, load, and the move of models between groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from tinkex.store.dialects import dialect_insert
from tinkex.store.records import GroupRecord, GroupState, JobState, RunState
from tinkex.store.schema import groups, jobs, runs

#: Databases limit the number of parameters of a statement.
_IDS_PER_STATEMENT = 1000
_UPDATE = sa.update(groups).where(groups.c.id == sa.bindparam("group"))


class SampleRow(NamedTuple):
    """An unfinished sample, as placement needs it."""

    id: str
    tenant_id: str
    sampler_id: str | None
    base_model: str | None

    @property
    def source(self) -> str:
        """What its placement depends on; see `sample_source`."""
        return sample_source(self.tenant_id, self.sampler_id, self.base_model)


def sample_source(tenant_id: str, sampler_id: str | None, base_model: str | None) -> str:
    """Return the key by which samples are placed: samples that share caches have the same."""
    return f"{tenant_id}/{sampler_id or base_model or ''}"


def register(db: sa.Connection, group: GroupRecord) -> None:
    """Insert or replace the row of a group."""
    values = group.to_columns()
    statement = dialect_insert(db.dialect.name, groups).values(values)
    db.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


def set_base_models(
    db: sa.Connection, group_id: str, models: Sequence[Mapping[str, object]], source: str
) -> None:
    """Store the base models that a group serves."""
    statement = sa.update(groups).where(groups.c.id == group_id)
    db.execute(statement.values(base_models=list(models), models_source=source))


def report_load(db: sa.Connection, group_id: str, load: Mapping[str, float], now: float) -> None:
    """Store the load of a group and that it is alive."""
    db.execute(_UPDATE, {"group": group_id, "load": dict(load), "seen_at": now})


def touch(db: sa.Connection, group_id: str, now: float) -> None:
    """Record that a group is alive."""
    db.execute(_UPDATE, {"group": group_id, "seen_at": now})


def set_state(db: sa.Connection, group_id: str, state: GroupState) -> bool:
    """Set the state of a group; returns False if it does not exist."""
    statement = sa.update(groups).where(groups.c.id == group_id)
    return bool(db.execute(statement.values(state=state)).rowcount)


def find(db: sa.Connection, group_id: str) -> GroupRecord | None:
    """Return a group by id."""
    row = db.execute(sa.select(groups).where(groups.c.id == group_id)).one_or_none()
    return None if row is None else GroupRecord.from_row(row)


def list_current(db: sa.Connection) -> list[GroupRecord]:
    """Return the groups that are not retired, by id."""
    query = sa.select(groups).where(groups.c.state != GroupState.RETIRED).order_by(groups.c.id)
    return [GroupRecord.from_row(row) for row in db.execute(query)]


def list_runs_of(db: sa.Connection, group_id: str) -> dict[str, str]:
    """Return the base models of a group's loadable models, by id."""
    query = sa.select(runs.c.id, runs.c.base_model).where(
        runs.c.group_id == group_id, runs.c.state.in_([RunState.CREATING, RunState.READY])
    )
    return {row.id: row.base_model for row in db.execute(query.order_by(runs.c.id))}


def count_runs_of(db: sa.Connection, group_id: str) -> int:
    """Return the number of a group's loadable models."""
    query = sa.select(sa.func.count()).where(
        runs.c.group_id == group_id, runs.c.state.in_([RunState.CREATING, RunState.READY])
    )
    return db.scalar(query) or 0


def list_open_samples(db: sa.Connection, group_id: str) -> list[SampleRow]:
    """Return a group's unfinished jobs without a model, in order of arrival."""
    query = (
        sa.select(jobs.c.id, jobs.c.tenant_id, jobs.c.sampler_id, jobs.c.base_model)
        .where(jobs.c.group_id == group_id, jobs.c.finished_at.is_(None), jobs.c.run_id.is_(None))
        .order_by(jobs.c.no)
    )
    return [SampleRow(*row) for row in db.execute(query)]


def list_queued_samples(
    db: sa.Connection, group_id: str, base_models: Iterable[str], *, limit: int
) -> list[str]:
    """Return a group's newest queued samples of these base models."""
    query = (
        sa.select(jobs.c.id)
        .where(
            jobs.c.state == JobState.QUEUED,
            jobs.c.group_id == group_id,
            jobs.c.run_id.is_(None),
            jobs.c.base_model.in_(list(base_models)),
        )
        .order_by(jobs.c.no.desc())
        .limit(limit)
    )
    return list(db.scalars(query))


def list_strays(db: sa.Connection) -> list[tuple[str, str]]:
    """Return the (model, its group) of unfinished jobs that are in another group than their model.

    A model may move between the check and the commit of a request.
    """
    query = (
        sa.select(runs.c.id, runs.c.group_id)
        .join(jobs, jobs.c.run_id == runs.c.id)
        .where(jobs.c.finished_at.is_(None), jobs.c.group_id != runs.c.group_id)
        .distinct()
    )
    return [(run_id, group_id) for run_id, group_id in db.execute(query)]


def move_runs(db: sa.Connection, run_ids: Sequence[str], target: str) -> None:
    """Give models and their unfinished jobs to another group.

    The caller owns the models, or has raised the epoch of their owner in the same transaction.
    """
    for start in range(0, len(run_ids), _IDS_PER_STATEMENT):
        some = run_ids[start : start + _IDS_PER_STATEMENT]
        db.execute(sa.update(runs).where(runs.c.id.in_(some)).values(group_id=target))
        _move_jobs(db, jobs.c.run_id.in_(some), target)


def move_samples(db: sa.Connection, job_ids: Sequence[str], target: str) -> None:
    """Give unfinished samples to another group."""
    for start in range(0, len(job_ids), _IDS_PER_STATEMENT):
        _move_jobs(db, jobs.c.id.in_(job_ids[start : start + _IDS_PER_STATEMENT]), target)


def _move_jobs(db: sa.Connection, condition: sa.ColumnElement[bool], target: str) -> None:
    is_moved = sa.and_(condition, jobs.c.finished_at.is_(None), jobs.c.group_id != target)
    db.execute(sa.update(jobs).where(is_moved).values(group_id=target, state=JobState.QUEUED))
    counted = sa.update(groups).where(groups.c.id == target)
    db.execute(counted.values(num_moves=groups.c.num_moves + 1))
