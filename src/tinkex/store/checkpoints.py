"""Saved weights: where they are, who may see them, and when they go."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from tinkex.ids import EXTERNAL_SEGMENT, TinkerPath
from tinkex.store.records import CheckpointRecord
from tinkex.store.schema import checkpoints, jobs, samplers, sessions

_NEWEST_FIRST = (checkpoints.c.created_at.desc(), checkpoints.c.id.desc())


class ProjectStorage(NamedTuple):
    """What a project keeps."""

    project_id: str
    num_checkpoints: int
    num_bytes: int


def _is_live(now: float) -> sa.ColumnElement[bool]:
    is_young = sa.or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > now)
    return sa.and_(checkpoints.c.deleted_at.is_(None), is_young)


def _is_listed(now: float) -> sa.ColumnElement[bool]:
    return sa.and_(_is_live(now), ~checkpoints.c.is_ephemeral)


def _is_at(path: TinkerPath) -> sa.ColumnElement[bool]:
    return sa.and_(
        checkpoints.c.run_id == path.run_id,
        checkpoints.c.segment == path.segment,
        checkpoints.c.name == path.name,
    )


def insert(db: sa.Connection, checkpoint: CheckpointRecord) -> None:
    """Store new weights; one that expired at the same path makes room."""
    now = checkpoint.created_at
    old = sa.and_(_is_at(checkpoint.path), checkpoints.c.deleted_at.is_(None))
    db.execute(
        sa.update(checkpoints).where(old, checkpoints.c.expires_at <= now).values(deleted_at=now)
    )
    db.execute(sa.insert(checkpoints).values(checkpoint.to_columns()))


def find(db: sa.Connection, path: TinkerPath, now: float) -> CheckpointRecord | None:
    """Weights by their address, unless they are deleted or expired."""
    return _find_one(db, sa.and_(_is_at(path), _is_live(now)))


def find_by_id(db: sa.Connection, checkpoint_id: str, now: float) -> CheckpointRecord | None:
    """Weights by id, unless they are deleted or expired."""
    return _find_one(db, sa.and_(checkpoints.c.id == checkpoint_id, _is_live(now)))


def _find_one(db: sa.Connection, condition: sa.ColumnElement[bool]) -> CheckpointRecord | None:
    row = db.execute(sa.select(checkpoints).where(condition)).one_or_none()
    return None if row is None else CheckpointRecord.from_row(row)


def _is_listed_in(now: float, with_external: bool) -> sa.ColumnElement[bool]:
    if with_external:
        return _is_listed(now)
    return sa.and_(_is_listed(now), checkpoints.c.segment != EXTERNAL_SEGMENT)


def list_by_run(
    db: sa.Connection, run_id: str, now: float, *, with_external: bool = True
) -> list[CheckpointRecord]:
    """What a model has saved, newest first, without the ephemeral."""
    is_wanted = sa.and_(checkpoints.c.run_id == run_id, _is_listed_in(now, with_external))
    query = sa.select(checkpoints).where(is_wanted)
    return [CheckpointRecord.from_row(row) for row in db.execute(query.order_by(*_NEWEST_FIRST))]


def list_page(
    db: sa.Connection,
    tenant_id: str,
    *,
    limit: int,
    offset: int,
    now: float,
    with_external: bool = True,
) -> tuple[list[CheckpointRecord], int]:
    """What a tenant has saved, newest first, without the ephemeral, and how many in all."""
    is_wanted = sa.and_(checkpoints.c.tenant_id == tenant_id, _is_listed_in(now, with_external))
    count = sa.select(sa.func.count()).select_from(checkpoints).where(is_wanted)
    query = sa.select(checkpoints).where(is_wanted).order_by(*_NEWEST_FIRST)
    rows = db.execute(query.limit(limit).offset(offset))
    return [CheckpointRecord.from_row(row) for row in rows], db.scalar(count) or 0


def newest_by_run(
    db: sa.Connection, run_ids: Sequence[str], now: float
) -> dict[tuple[str, str], CheckpointRecord]:
    """The newest of each model and segment, without the ephemeral."""
    place = sa.func.row_number().over(
        partition_by=(checkpoints.c.run_id, checkpoints.c.segment), order_by=_NEWEST_FIRST
    )
    ranked = (
        sa.select(checkpoints.c.id, place.label("place"))
        .where(checkpoints.c.run_id.in_(run_ids), _is_listed(now))
        .subquery()
    )
    query = sa.select(checkpoints).join(ranked, ranked.c.id == checkpoints.c.id)
    found = [CheckpointRecord.from_row(row) for row in db.execute(query.where(ranked.c.place == 1))]
    return {(checkpoint.run_id, checkpoint.segment): checkpoint for checkpoint in found}


def set_public(db: sa.Connection, checkpoint_id: str, is_public: bool) -> bool:
    """Publish or hide; False if it was so already."""
    differs = sa.and_(checkpoints.c.id == checkpoint_id, checkpoints.c.is_public != is_public)
    change = sa.update(checkpoints).where(differs).values(is_public=is_public)
    return bool(db.execute(change).rowcount)


def set_expiry(db: sa.Connection, checkpoint_id: str, expires_at: float | None) -> None:
    """Say when weights go; None is never."""
    is_it = checkpoints.c.id == checkpoint_id
    db.execute(sa.update(checkpoints).where(is_it).values(expires_at=expires_at))


def delete(db: sa.Connection, checkpoint_id: str, now: float) -> bool:
    """Let nobody find these weights any more; False if nobody could."""
    is_it = sa.and_(checkpoints.c.id == checkpoint_id, checkpoints.c.deleted_at.is_(None))
    return bool(db.execute(sa.update(checkpoints).where(is_it).values(deleted_at=now)).rowcount)


def storage_by_project(
    db: sa.Connection, tenant_id: str, project_id: str | None, now: float
) -> list[ProjectStorage]:
    """What a tenant keeps in each project, or in one."""
    query = sa.select(
        checkpoints.c.project_id, sa.func.count(), sa.func.sum(checkpoints.c.size_bytes)
    ).where(checkpoints.c.tenant_id == tenant_id, _is_listed(now))
    if project_id is not None:
        query = query.where(checkpoints.c.project_id == project_id)
    grouped = query.group_by(checkpoints.c.project_id).order_by(checkpoints.c.project_id)
    return [
        ProjectStorage(project, count, int(size)) for project, count, size in db.execute(grouped)
    ]


# --- the end of weights ----------------------------------------------------------------------
def collect_deletable(
    db: sa.Connection,
    now: float,
    limit: int = 100,
    *,
    ephemeral_seconds: float = 3600.0,
    finished_seconds: float = 60.0,
    in_use: Collection[str] = (),
) -> list[str]:
    """Weights whose files may go: deleted, expired, or ephemeral of a session that is over.

    A client can come back to a session that expired, and not to one that it finished.

    All of them count as deleted from now on; `forget` them when their files are gone. Those that
    are needed still stay.
    """
    is_free = checkpoints.c.id.not_in(in_use)
    gone = sa.select(checkpoints.c.id).where(checkpoints.c.deleted_at.is_not(None), is_free)
    found = list(db.scalars(gone.limit(limit)))
    orphaned = _orphaned(now - finished_seconds, now - ephemeral_seconds)
    for ripe in (_expired(now), orphaned):
        if len(found) < limit:
            found += _mark_deleted(db, ripe.where(is_free).limit(limit - len(found)), now)
    return found


def _expired(now: float) -> sa.Select[str]:
    return sa.select(checkpoints.c.id).where(
        checkpoints.c.deleted_at.is_(None), checkpoints.c.expires_at <= now
    )


def _orphaned(finished_before: float, expired_before: float) -> sa.Select[str]:
    is_over = sa.or_(
        sessions.c.finished_at <= finished_before, sessions.c.expired_at <= expired_before
    )
    return (
        sa.select(checkpoints.c.id)
        .join(sessions, sessions.c.id == checkpoints.c.session_id)
        .where(
            checkpoints.c.is_ephemeral,
            checkpoints.c.deleted_at.is_(None),
            is_over,
            ~_has_open_samples(),
        )
    )


def delete_surplus_unnamed(db: sa.Connection, run_id: str, num_kept: int, now: float) -> int:
    """Delete a model's unnamed sampler weights but the `kept` used last; returns how many.

    Weights that a sample waits for stay until the next call.
    """
    last_use = sa.select(sa.func.max(samplers.c.used_at)).where(
        samplers.c.checkpoint_id == checkpoints.c.id
    )
    used_at = sa.func.coalesce(last_use.scalar_subquery(), 0.0)
    newest_use = sa.case(
        (used_at > checkpoints.c.created_at, used_at), else_=checkpoints.c.created_at
    )
    surplus = (
        sa.select(checkpoints.c.id)
        .where(
            checkpoints.c.run_id == run_id,
            checkpoints.c.is_ephemeral,
            checkpoints.c.deleted_at.is_(None),
        )
        .order_by(newest_use.desc(), *_NEWEST_FIRST)
        .offset(num_kept)
    )
    is_surplus = checkpoints.c.id.in_(list(db.scalars(surplus)))
    chosen = sa.select(checkpoints.c.id).where(is_surplus, ~_has_open_samples())
    return len(_mark_deleted(db, chosen, now))


def _has_open_samples() -> sa.ColumnElement[bool]:
    """Whether a sample of these weights waits or runs."""
    return (
        sa.exists()
        .where(
            samplers.c.checkpoint_id == checkpoints.c.id,
            jobs.c.sampler_id == samplers.c.id,
            jobs.c.tenant_id == samplers.c.tenant_id,
            jobs.c.finished_at.is_(None),
        )
        .correlate(checkpoints)
    )


def _mark_deleted(db: sa.Connection, query: sa.Select[str], now: float) -> list[str]:
    ids: list[str] = list(db.scalars(query))
    db.execute(sa.update(checkpoints).where(checkpoints.c.id.in_(ids)).values(deleted_at=now))
    return ids


def delete_row(db: sa.Connection, checkpoint_id: str) -> None:
    """Remove what is known of weights; their files must be gone."""
    db.execute(sa.delete(checkpoints).where(checkpoints.c.id == checkpoint_id))


def list_ids(db: sa.Connection) -> set[str]:
    """Whose files have a reason to be there."""
    return set(db.scalars(sa.select(checkpoints.c.id)))
