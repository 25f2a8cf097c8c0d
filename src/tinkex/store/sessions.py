"""Client sessions: heartbeats, end, and search."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import sqlalchemy as sa

from tinkex import types
from tinkex.store.dialects import has_metadata
from tinkex.store.records import SessionRecord
from tinkex.store.schema import checkpoints, sessions

#: The columns of a record; `search_name` is only used in queries.
SESSION_COLUMNS = [column for column in sessions.c if column.name != "search_name"]

_FIND = sa.select(*SESSION_COLUMNS).where(sessions.c.id == sa.bindparam("session_id"))


def insert(db: sa.Connection, session: SessionRecord) -> None:
    """Store a new session."""
    values = session.to_columns() | {"search_name": (session.display_name or "").lower()}
    db.execute(sa.insert(sessions).values(values))


def find(db: sa.Connection, session_id: str) -> SessionRecord | None:
    """Return a session by id."""
    row = db.execute(_FIND, {"session_id": session_id}).one_or_none()
    return None if row is None else SessionRecord.from_row(row)


def find_many(db: sa.Connection, session_ids: Collection[str]) -> dict[str, SessionRecord]:
    """Return sessions by id."""
    query = sa.select(*SESSION_COLUMNS).where(sessions.c.id.in_(session_ids))
    return {row.id: SessionRecord.from_row(row) for row in db.execute(query)}


def touch(db: sa.Connection, session_id: str, now: float) -> None:
    """Record a heartbeat of a session's client."""
    db.execute(
        sa.update(sessions).where(sessions.c.id == session_id).values(seen_at=now, expired_at=None)
    )


def finish(db: sa.Connection, session_id: str, reason: str, detail: str | None, now: float) -> None:
    """Record how a session ended; the first reason is kept."""
    db.execute(
        sa.update(sessions)
        .where(sessions.c.id == session_id, sessions.c.finished_at.is_(None))
        .values(finished_at=now, finish_reason=reason, finish_detail=detail)
    )


def list_ids(db: sa.Connection, tenant_id: str, *, limit: int, offset: int) -> list[str]:
    """Return the ids of a tenant's sessions, newest first."""
    query = (
        sa.select(sessions.c.id)
        .where(sessions.c.tenant_id == tenant_id)
        .order_by(sessions.c.created_at.desc(), sessions.c.id.desc())
    )
    return list(db.scalars(query.limit(limit).offset(offset)))


def assign_project(db: sa.Connection, session_id: str, project_id: str) -> None:
    """Move a session and its checkpoints to a project."""
    values = {"project_id": project_id}
    db.execute(sa.update(sessions).where(sessions.c.id == session_id).values(values))
    db.execute(sa.update(checkpoints).where(checkpoints.c.session_id == session_id).values(values))


def expire_unseen(db: sa.Connection, *, unseen_since: float, now: float) -> int:
    """Mark sessions without a recent heartbeat as expired; returns their number."""
    return db.execute(
        sa.update(sessions)
        .where(
            sessions.c.finished_at.is_(None),
            sessions.c.expired_at.is_(None),
            sessions.c.seen_at < unseen_since,
        )
        .values(expired_at=now)
    ).rowcount


class SessionWithStorage(NamedTuple):
    """A session, and the number and size of its checkpoints."""

    session: SessionRecord
    num_checkpoints: int
    checkpoint_bytes: int


class SessionSearchPage(NamedTuple):
    """A page of results, and the cursor of the next one; None after the last."""

    sessions: list[SessionWithStorage]
    next_cursor: types.SessionSearchCursor | None


def search(
    db: sa.Connection, tenant_id: str, owner_urn: str, request: types.SessionSearchRequest
) -> SessionSearchPage:
    """Return a page of a tenant's matching sessions; `owner_urn` is the tenant's public name."""
    owner = request.owner
    # This server has no teams: a tenant lists only its own sessions.
    if isinstance(owner, types.UserSearchOwner) and owner_urn not in owner.owner_urns:
        return SessionSearchPage([], None)
    query = (
        sa.select(*SESSION_COLUMNS)
        .where(sessions.c.tenant_id == tenant_id, *_conditions(db, tenant_id, request))
        .order_by(sessions.c.created_at.desc(), sessions.c.id.desc())
        .limit(request.limit + 1)
    )
    records = [SessionRecord.from_row(row) for row in db.execute(query)]
    page = records[: request.limit]
    cursor = _cursor_after(page[-1]) if len(records) > len(page) else None
    return SessionSearchPage(_add_storage(db, page), cursor)


def _cursor_after(session: SessionRecord) -> types.SessionSearchCursor:
    return types.SessionSearchCursor(
        last_created_at=datetime.fromtimestamp(session.created_at, UTC),
        last_session_id=session.id,
    )


def _add_storage(db: sa.Connection, page: Sequence[SessionRecord]) -> list[SessionWithStorage]:
    query = (
        sa.select(checkpoints.c.session_id, sa.func.count(), sa.func.sum(checkpoints.c.size_bytes))
        .where(
            checkpoints.c.session_id.in_([session.id for session in page]),
            checkpoints.c.deleted_at.is_(None),
            ~checkpoints.c.is_ephemeral,
        )
        .group_by(checkpoints.c.session_id)
    )
    saved = {row[0]: (row[1], int(row[2])) for row in db.execute(query)}
    return [SessionWithStorage(session, *saved.get(session.id, (0, 0))) for session in page]


def _conditions(
    db: sa.Connection, tenant_id: str, request: types.SessionSearchRequest
) -> list[sa.ColumnElement[bool]]:
    conditions = [
        has_metadata(db, sessions.c.user_metadata, key, value)
        for key, value in request.user_metadata.items()
    ]
    if request.project_ids is not None:
        conditions.append(sessions.c.project_id.in_(request.project_ids))
    if request.session_id is not None or request.display_name is not None:
        conditions.append(_is_named(request))
    if request.statuses is not None:
        conditions.append(sa.or_(*(_has_status(query) for query in request.statuses)))
    if request.cursor is not None:
        conditions.append(_is_after(request.cursor, tenant_id))
    return conditions


def _is_named(request: types.SessionSearchRequest) -> sa.ColumnElement[bool]:
    """Return a condition: the id or the name matches."""
    either = []
    if request.session_id is not None:
        either.append(sessions.c.id == request.session_id)
    if request.display_name is not None:
        words = request.display_name.lower().split()
        has_all = [sessions.c.search_name.contains(word, autoescape=True) for word in words]
        either.append(sa.and_(sa.true(), *has_all))
    return sa.or_(*either)


def _has_status(query: types.SessionStatusQuery) -> sa.ColumnElement[bool]:
    if isinstance(query, types.ClientFinishedSessionStatusQuery):
        if query.reasons is None:
            return sessions.c.finished_at.is_not(None)
        return sessions.c.finish_reason.in_(query.reasons)
    if isinstance(query, types.FailedSessionStatusQuery):
        # On this server a failed request does not fail its session.
        return sa.false()
    is_lost = sessions.c.expired_at.is_not(None)
    is_wanted = is_lost if isinstance(query, types.CancelledSessionStatusQuery) else ~is_lost
    return sa.and_(sessions.c.finished_at.is_(None), is_wanted)


def _is_after(cursor: types.SessionSearchCursor, tenant_id: str) -> sa.ColumnElement[bool]:
    # The cursor's time is rounded, so the session's own time is preferred.
    last = sessions.alias("last")
    known = sa.select(last.c.created_at).where(
        last.c.id == cursor.last_session_id, last.c.tenant_id == tenant_id
    )
    began = sa.func.coalesce(known.scalar_subquery(), cursor.last_created_at.timestamp())
    return sa.or_(
        sessions.c.created_at < began,
        sa.and_(sessions.c.created_at == began, sessions.c.id < cursor.last_session_id),
    )
