"""Training runs (models): state, snapshots and listing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from tinkex.store import blobs
from tinkex.store.dialects import lock_rows
from tinkex.store.records import JobState, RunRecord, RunState
from tinkex.store.schema import checkpoints, jobs, runs, sessions

# Frequent statements are built once, because building takes longer than running.
_FIND = sa.select(runs).where(runs.c.id == sa.bindparam("run_id"))


def insert(db: sa.Connection, run: RunRecord) -> None:
    """Store a new model."""
    db.execute(sa.insert(runs).values(run.to_columns()))


def find(db: sa.Connection, run_id: str) -> RunRecord | None:
    """Return a model by id."""
    row = db.execute(_FIND, {"run_id": run_id}).one_or_none()
    return None if row is None else RunRecord.from_row(row)


def set_state(db: sa.Connection, run_id: str, state: RunState) -> None:
    """Set the state of a model."""
    db.execute(sa.update(runs).where(runs.c.id == run_id).values(state=state))


def set_snapshot(db: sa.Connection, run_id: str, directory: str, applied: int) -> str | None:
    """Store the snapshot of a model; returns the directory in the home that is now unused.

    Payloads of included changes are dropped. An older snapshot does not replace a newer one. Unused
    places in the object store are queued for removal.
    """
    before = db.scalar(sa.select(runs.c.snapshot).where(runs.c.id == run_id))
    replaced = db.execute(
        sa.update(runs)
        .where(runs.c.id == run_id, runs.c.snapshot_applied <= applied)
        .values(snapshot=directory, snapshot_applied=applied)
    )
    if replaced.rowcount:
        _drop_payloads(db, sa.and_(jobs.c.run_id == run_id, jobs.c.applied <= applied))
    unused = before if replaced.rowcount else directory
    if unused is None or before == directory:
        return None
    if not _is_place(unused):
        return unused
    blobs.mark_place_unused(db, unused)
    return None


def _is_place(snapshot: str) -> bool:
    """Return whether a snapshot is in the object store."""
    return "/" in snapshot


def _drop_payloads(db: sa.Connection, is_included: sa.ColumnElement[bool]) -> None:
    """Drop the payloads of changes that a snapshot includes."""
    has_payload = sa.and_(is_included, jobs.c.payload.is_not(None))
    # In the same order as API processes, which mark finished jobs as fetched.
    lock_rows(db, sa.select(jobs.c.no).where(has_payload).order_by(jobs.c.no))
    blobs.mark_unused(db, blobs.select_payloads(has_payload))
    db.execute(sa.update(jobs).where(has_payload).values(payload=None, payload_ref=None))


def clear_unloaded(db: sa.Connection) -> list[str]:
    """Drop snapshots and payloads of unloaded models; returns unused directories in the home."""
    has_state = sa.or_(runs.c.snapshot.is_not(None), runs.c.snapshot_applied < runs.c.applied)
    query = sa.select(runs.c.id, runs.c.snapshot).where(
        runs.c.state == RunState.UNLOADED, has_state
    )
    rows = db.execute(query).all()
    ids = [row.id for row in rows]
    _drop_payloads(db, sa.and_(jobs.c.run_id.in_(ids), jobs.c.applied.is_not(None)))
    db.execute(
        sa.update(runs)
        .where(runs.c.id.in_(ids))
        .values(snapshot=None, snapshot_applied=runs.c.applied)
    )
    snapshots = [row.snapshot for row in rows if row.snapshot is not None]
    for place in filter(_is_place, snapshots):
        blobs.mark_place_unused(db, place)
    return [name for name in snapshots if not _is_place(name)]


def list_snapshots(db: sa.Connection) -> set[str]:
    """Return the directories of all current snapshots."""
    return {name for name in db.scalars(sa.select(runs.c.snapshot)) if name is not None}


_NAME = runs.c.user_metadata["name"].as_string()
SORT_COLUMNS: Mapping[str, sa.ColumnElement[object]] = {
    "created": runs.c.created_at,
    "active": runs.c.used_at,
    "steps": runs.c.num_steps,
    "model": runs.c.base_model,
    "name": sa.func.lower(sa.func.coalesce(_NAME, sessions.c.display_name, "")),
}
"""What lists of models can be sorted by."""


def list_page(  # noqa: PLR0913 - filters and order of a list, by name
    db: sa.Connection,
    tenant_id: str,
    *,
    limit: int,
    offset: int,
    with_public: bool = False,
    project_id: str | None = None,
    search: str | None = None,
    sort: str = "-created",
) -> tuple[list[RunRecord], int]:
    """Return a page of a tenant's models and the total.

    `with_public` adds other tenants' models with a public checkpoint; `search` is a prefix of an id
    or a part of a name or tag; `sort` is a name of `SORT_COLUMNS`, descending after a minus.
    """
    is_own = runs.c.tenant_id == tenant_id
    condition = sa.or_(is_own, runs.c.id.in_(_select_published())) if with_public else is_own
    query = sa.select(runs).where(condition)
    order = SORT_COLUMNS[sort.removeprefix("-")]
    if project_id is not None or search is not None or sort.endswith("name"):
        query = query.join(sessions, sessions.c.id == runs.c.session_id)
    if project_id is not None:
        query = query.where(sessions.c.project_id == project_id)
    if search is not None:
        query = query.where(_is_search_match(tenant_id, search))
    total = db.scalar(sa.select(sa.func.count()).select_from(query.subquery())) or 0
    first = order.desc() if sort.startswith("-") else order.asc()
    ordered = query.order_by(first, runs.c.created_at.desc(), runs.c.id.desc())
    return [
        RunRecord.from_row(row) for row in db.execute(ordered.limit(limit).offset(offset))
    ], total


def _is_search_match(tenant_id: str, search: str) -> sa.ColumnElement[bool]:
    """Return a condition: the id starts with the text, or a name of this tenant contains it."""
    # Tags are JSON; SQLite keeps other characters than ASCII escaped, PostgreSQL does not.
    needles = {search.lower(), json.dumps(search)[1:-1].lower()}
    tags = (runs.c.user_metadata["tags"].as_string(), sa.cast(sessions.c.tags, sa.Text))
    is_named = sa.or_(
        _NAME.contains(search, autoescape=True),
        # SQLite lowers only ASCII letters; the line above matches others exactly.
        sa.func.lower(_NAME).contains(search.lower(), autoescape=True),
        sessions.c.search_name.contains(search.lower(), autoescape=True),
        *(
            sa.func.lower(column).contains(needle, autoescape=True)
            for column in tags
            for needle in sorted(needles)
        ),
    )
    return sa.or_(
        runs.c.id.startswith(search, autoescape=True),
        sa.and_(runs.c.tenant_id == tenant_id, is_named),
    )


def rename(db: sa.Connection, run: RunRecord, name: str | None) -> None:
    """Set the name of a model, or remove it."""
    _set_metadata(db, run, "name", name)


def set_tags(db: sa.Connection, run: RunRecord, tags: Sequence[str]) -> None:
    """Replace the tags of a model; those of its session stay."""
    _set_metadata(db, run, "tags", list(tags) or None)


def _set_metadata(db: sa.Connection, run: RunRecord, key: str, value: object) -> None:
    others = {name: each for name, each in (run.user_metadata or {}).items() if name != key}
    metadata = others if value is None else others | {key: value}
    db.execute(sa.update(runs).where(runs.c.id == run.id).values(user_metadata=metadata or None))


def _select_published() -> sa.Select[str]:
    return sa.select(checkpoints.c.run_id).where(
        checkpoints.c.is_public, checkpoints.c.deleted_at.is_(None)
    )


def list_by_session(db: sa.Connection, session_id: str) -> list[RunRecord]:
    """Return a session's models, oldest first."""
    query = sa.select(runs).where(runs.c.session_id == session_id)
    return [
        RunRecord.from_row(row) for row in db.execute(query.order_by(runs.c.created_at, runs.c.id))
    ]


def list_idle(db: sa.Connection, run_ids: Sequence[str]) -> list[str]:
    """Return which of these models have no unfinished jobs and an ended session."""
    query = (
        sa.select(runs.c.id)
        .join(sessions, sessions.c.id == runs.c.session_id)
        .where(
            runs.c.id.in_(run_ids),
            runs.c.state == RunState.READY,
            sa.or_(sessions.c.finished_at.is_not(None), sessions.c.expired_at.is_not(None)),
            ~_has_open_jobs(),
        )
    )
    return list(db.scalars(query))


def _has_open_jobs() -> sa.ColumnElement[bool]:
    """Return a condition: the model has unfinished jobs."""
    return (
        sa.exists()
        .where(jobs.c.run_id == runs.c.id, jobs.c.state.in_([JobState.QUEUED, JobState.RUNNING]))
        .correlate(runs)
    )


def unload_unused(db: sa.Connection, *, finished_before: float, expired_before: float) -> None:
    """Unload models whose session was finished or expired before these times.

    Their checkpoints stay.
    """
    is_over = sa.or_(
        sessions.c.finished_at < finished_before,
        sa.and_(sessions.c.finished_at.is_(None), sessions.c.expired_at < expired_before),
    )
    ended = sa.select(runs.c.id).join(sessions, sessions.c.id == runs.c.session_id).where(is_over)
    unloaded = sa.update(runs).where(
        runs.c.state == RunState.READY, runs.c.id.in_(ended), ~_has_open_jobs()
    )
    db.execute(unloaded.values(state=RunState.UNLOADED))
