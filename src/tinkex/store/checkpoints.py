"""Checkpoints: lookup, visibility, expiry and deletion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from tinkex.ids import EXTERNAL_SEGMENT, SAMPLER_SEGMENT, TinkerPath
from tinkex.store import blobs
from tinkex.store.records import CheckpointRecord
from tinkex.store.schema import checkpoints, jobs, samplers, sessions

NEWEST_FIRST = (checkpoints.c.created_at.desc(), checkpoints.c.id.desc())


class ProjectStorage(NamedTuple):
    """The checkpoints of a project."""

    project_id: str
    num_checkpoints: int
    num_bytes: int


def is_live(now: float) -> sa.ColumnElement[bool]:
    """Return a condition: a checkpoint is neither deleted nor expired."""
    is_young = sa.or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > now)
    return sa.and_(checkpoints.c.deleted_at.is_(None), is_young)


def is_listed(now: float) -> sa.ColumnElement[bool]:
    """Return a condition: a checkpoint is live and belongs in lists."""
    return sa.and_(is_live(now), ~checkpoints.c.is_ephemeral)


def _is_at(path: TinkerPath) -> sa.ColumnElement[bool]:
    return sa.and_(
        checkpoints.c.run_id == path.run_id,
        checkpoints.c.segment == path.segment,
        checkpoints.c.name == path.name,
    )


def insert(db: sa.Connection, checkpoint: CheckpointRecord) -> None:
    """Store a checkpoint; an expired one at the same path is marked as deleted."""
    now = checkpoint.created_at
    old = sa.and_(_is_at(checkpoint.path), checkpoints.c.deleted_at.is_(None))
    db.execute(
        sa.update(checkpoints).where(old, checkpoints.c.expires_at <= now).values(deleted_at=now)
    )
    db.execute(sa.insert(checkpoints).values(checkpoint.to_columns()))


def find(db: sa.Connection, path: TinkerPath, now: float) -> CheckpointRecord | None:
    """Return the checkpoint at a path, unless it is deleted or expired."""
    return _find_one(db, sa.and_(_is_at(path), is_live(now)))


def find_by_id(db: sa.Connection, checkpoint_id: str, now: float) -> CheckpointRecord | None:
    """Return a checkpoint by id, unless it is deleted or expired."""
    return _find_one(db, sa.and_(checkpoints.c.id == checkpoint_id, is_live(now)))


def lock_live(db: sa.Connection, checkpoint_id: str, now: float) -> bool:
    """Keep a checkpoint from being deleted in this transaction; returns False if it is gone."""
    query = sa.select(checkpoints.c.id).where(checkpoints.c.id == checkpoint_id, is_live(now))
    return db.scalar(query.with_for_update(read=True)) is not None


def _find_one(db: sa.Connection, condition: sa.ColumnElement[bool]) -> CheckpointRecord | None:
    row = db.execute(sa.select(checkpoints).where(condition)).one_or_none()
    return None if row is None else CheckpointRecord.from_row(row)


def _is_listed_in(now: float, with_external: bool) -> sa.ColumnElement[bool]:
    if with_external:
        return is_listed(now)
    return sa.and_(is_listed(now), checkpoints.c.segment != EXTERNAL_SEGMENT)


def list_by_run(
    db: sa.Connection, run_id: str, now: float, *, with_external: bool = True
) -> list[CheckpointRecord]:
    """Return a model's checkpoints, newest first, without ephemeral ones."""
    is_wanted = sa.and_(checkpoints.c.run_id == run_id, _is_listed_in(now, with_external))
    query = sa.select(checkpoints).where(is_wanted)
    return [CheckpointRecord.from_row(row) for row in db.execute(query.order_by(*NEWEST_FIRST))]


def list_page(
    db: sa.Connection,
    tenant_id: str,
    *,
    limit: int,
    offset: int,
    now: float,
    with_external: bool = True,
) -> tuple[list[CheckpointRecord], int]:
    """Return a page of a tenant's checkpoints, newest first, and the total; no ephemeral ones."""
    is_wanted = sa.and_(checkpoints.c.tenant_id == tenant_id, _is_listed_in(now, with_external))
    count = sa.select(sa.func.count()).select_from(checkpoints).where(is_wanted)
    query = sa.select(checkpoints).where(is_wanted).order_by(*NEWEST_FIRST)
    rows = db.execute(query.limit(limit).offset(offset))
    return [CheckpointRecord.from_row(row) for row in rows], db.scalar(count) or 0


def list_samplers(
    db: sa.Connection,
    tenant_id: str,
    now: float,
    *,
    run_id: str | None = None,
    name: str | None = None,
    limit: int,
) -> list[CheckpointRecord]:
    """Return a tenant's sampler checkpoints, of a run or with a name, newest first."""
    query = sa.select(checkpoints).where(
        checkpoints.c.tenant_id == tenant_id,
        checkpoints.c.segment == SAMPLER_SEGMENT,
        is_listed(now),
    )
    if run_id is not None:
        query = query.where(checkpoints.c.run_id == run_id)
    if name is not None:
        query = query.where(checkpoints.c.name == name)
    rows = db.execute(query.order_by(*NEWEST_FIRST).limit(limit))
    return [CheckpointRecord.from_row(row) for row in rows]


def newest_by_run(
    db: sa.Connection, run_ids: Sequence[str], now: float
) -> dict[tuple[str, str], CheckpointRecord]:
    """Return the newest checkpoint per model and segment, without ephemeral ones."""
    rank = sa.func.row_number().over(
        partition_by=(checkpoints.c.run_id, checkpoints.c.segment), order_by=NEWEST_FIRST
    )
    ranked = (
        sa.select(checkpoints.c.id, rank.label("rank"))
        .where(checkpoints.c.run_id.in_(run_ids), is_listed(now))
        .subquery()
    )
    query = sa.select(checkpoints).join(ranked, ranked.c.id == checkpoints.c.id)
    newest = [CheckpointRecord.from_row(row) for row in db.execute(query.where(ranked.c.rank == 1))]
    return {(checkpoint.run_id, checkpoint.segment): checkpoint for checkpoint in newest}


def set_public(db: sa.Connection, checkpoint_id: str, is_public: bool) -> bool:
    """Publish or unpublish a checkpoint; returns False if nothing changed."""
    differs = sa.and_(checkpoints.c.id == checkpoint_id, checkpoints.c.is_public != is_public)
    change = sa.update(checkpoints).where(differs).values(is_public=is_public)
    return bool(db.execute(change).rowcount)


def set_expiry(db: sa.Connection, checkpoint_id: str, expires_at: float | None) -> None:
    """Set when a checkpoint expires; None means never."""
    condition = checkpoints.c.id == checkpoint_id
    db.execute(sa.update(checkpoints).where(condition).values(expires_at=expires_at))


def delete(db: sa.Connection, checkpoint_id: str, now: float) -> bool:
    """Mark a checkpoint as deleted; returns False if it already was."""
    condition = sa.and_(checkpoints.c.id == checkpoint_id, checkpoints.c.deleted_at.is_(None))
    return bool(db.execute(sa.update(checkpoints).where(condition).values(deleted_at=now)).rowcount)


def storage_by_project(
    db: sa.Connection, tenant_id: str, project_id: str | None, now: float
) -> list[ProjectStorage]:
    """Return a tenant's storage per project, or of one project."""
    query = sa.select(
        checkpoints.c.project_id, sa.func.count(), sa.func.sum(checkpoints.c.size_bytes)
    ).where(checkpoints.c.tenant_id == tenant_id, is_listed(now))
    if project_id is not None:
        query = query.where(checkpoints.c.project_id == project_id)
    grouped = query.group_by(checkpoints.c.project_id).order_by(checkpoints.c.project_id)
    return [
        ProjectStorage(project, count, int(size)) for project, count, size in db.execute(grouped)
    ]


# --- deletion --------------------------------------------------------------------------------
def collect_deletable(
    db: sa.Connection,
    now: float,
    limit: int = 100,
    *,
    ephemeral_seconds: float = 3600.0,
    finished_seconds: float = 60.0,
    in_use: Collection[str] = (),
) -> list[str]:
    """Mark and return checkpoints whose files can be deleted, except those in use.

    These are deleted ones, expired ones, and ephemeral ones of ended sessions. Ephemeral ones stay
    longer if the session expired, because its client may return. Call `delete_row` after the files
    are removed.
    """
    is_unused = checkpoints.c.id.not_in(in_use)
    deleted = sa.select(checkpoints.c.id).where(checkpoints.c.deleted_at.is_not(None), is_unused)
    collected = list(db.scalars(deleted.limit(limit)))
    orphaned = _orphaned(now - finished_seconds, now - ephemeral_seconds)
    for query in (_expired(now), orphaned):
        if len(collected) < limit:
            selected = query.where(is_unused).limit(limit - len(collected))
            collected += _mark_deleted(db, selected, now)
    return collected


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
    """Delete a model's unnamed sampler weights except the `num_kept` most recently used ones.

    Weights with unfinished samples stay until the next call. Returns the number of deleted ones.
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
        .order_by(newest_use.desc(), *NEWEST_FIRST)
        .offset(num_kept)
    )
    is_surplus = checkpoints.c.id.in_(list(db.scalars(surplus)))
    chosen = sa.select(checkpoints.c.id).where(is_surplus, ~_has_open_samples())
    return len(_mark_deleted(db, chosen, now))


def _has_open_samples() -> sa.ColumnElement[bool]:
    """Return a condition: a sample of these weights is queued or running."""
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


def delete_in_blobs(db: sa.Connection, checkpoint_ids: Collection[str]) -> list[str]:
    """Delete those of these rows whose files are in the object store; returns the others.

    Places without any other row are queued for removal.
    """
    is_deleted = sa.and_(checkpoints.c.id.in_(checkpoint_ids), checkpoints.c.place != "")
    places = sa.select(checkpoints.c.place).where(is_deleted).distinct()
    candidates = list(db.scalars(places))
    db.execute(sa.delete(checkpoints).where(is_deleted))
    still_used = sa.select(checkpoints.c.place).where(checkpoints.c.place.in_(candidates))
    for place in set(candidates) - set(db.scalars(still_used)):
        blobs.mark_place_unused(db, place)
    in_home = sa.select(checkpoints.c.id).where(checkpoints.c.id.in_(checkpoint_ids))
    return list(db.scalars(in_home))


def delete_row(db: sa.Connection, checkpoint_id: str) -> None:
    """Delete the row of a checkpoint whose files are removed."""
    db.execute(sa.delete(checkpoints).where(checkpoints.c.id == checkpoint_id))


def list_ids(db: sa.Connection) -> set[str]:
    """Return the ids of all checkpoints, deleted ones included."""
    return set(db.scalars(sa.select(checkpoints.c.id)))
