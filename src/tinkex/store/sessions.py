"""Clients' sessions: when they began, were last heard of, and ended."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from tinkex.store.records import SessionRecord
from tinkex.store.schema import checkpoints, sessions

#: What a record holds: the name to search by is ours alone.
SESSION_COLUMNS = [column for column in sessions.c if column.name != "search_name"]

_FIND = sa.select(*SESSION_COLUMNS).where(sessions.c.id == sa.bindparam("session_id"))


def insert(db: sa.Connection, session: SessionRecord) -> None:
    """Store a new session."""
    values = session.to_columns() | {"search_name": (session.display_name or "").lower()}
    db.execute(sa.insert(sessions).values(values))


def find(db: sa.Connection, session_id: str) -> SessionRecord | None:
    """A session by id."""
    row = db.execute(_FIND, {"session_id": session_id}).one_or_none()
    return None if row is None else SessionRecord.from_row(row)


def find_many(db: sa.Connection, session_ids: Collection[str]) -> dict[str, SessionRecord]:
    """These sessions by id."""
    query = sa.select(*SESSION_COLUMNS).where(sessions.c.id.in_(session_ids))
    return {row.id: SessionRecord.from_row(row) for row in db.execute(query)}


def touch(db: sa.Connection, session_id: str, now: float) -> None:
    """Note that a session's client is there."""
    db.execute(
        sa.update(sessions).where(sessions.c.id == session_id).values(seen_at=now, expired_at=None)
    )


def finish(db: sa.Connection, session_id: str, reason: str, detail: str | None, now: float) -> None:
    """Note how a session's client ended; the first reason holds."""
    db.execute(
        sa.update(sessions)
        .where(sessions.c.id == session_id, sessions.c.finished_at.is_(None))
        .values(finished_at=now, finish_reason=reason, finish_detail=detail)
    )


def list_ids(db: sa.Connection, tenant_id: str, *, limit: int, offset: int) -> list[str]:
    """The ids of a tenant's sessions, newest first."""
    query = (
        sa.select(sessions.c.id)
        .where(sessions.c.tenant_id == tenant_id)
        .order_by(sessions.c.created_at.desc(), sessions.c.id.desc())
    )
    return list(db.scalars(query.limit(limit).offset(offset)))


def assign_project(db: sa.Connection, session_id: str, project_id: str) -> None:
    """Move a session to a project, with the checkpoints that it made."""
    moved = {"project_id": project_id}
    db.execute(sa.update(sessions).where(sessions.c.id == session_id).values(moved))
    db.execute(sa.update(checkpoints).where(checkpoints.c.session_id == session_id).values(moved))


def expire_unseen(db: sa.Connection, *, unseen_since: float, now: float) -> int:
    """Give up sessions that were not heard of since then; returns how many."""
    return db.execute(
        sa.update(sessions)
        .where(
            sessions.c.finished_at.is_(None),
            sessions.c.expired_at.is_(None),
            sessions.c.seen_at < unseen_since,
        )
        .values(expired_at=now)
    ).rowcount
