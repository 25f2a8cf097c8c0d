"""The session search: which sessions fit, page by page."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tinkex import types
from tinkex.testing.state import Session, World
from tinkex.testing.tenants import owner_urn


def search(world: World, tenant: str, request: types.SessionSearchRequest) -> dict[str, Any]:
    """A page of sessions that fit, newest first, and where the next page begins."""
    found = sorted(
        (
            session
            for session in world.sessions.values()
            if _is_visible(session, tenant, request.owner) and _fits(session, request)
        ),
        key=_place,
        reverse=True,
    )
    if (cursor := request.cursor) is not None:
        last = (cursor.last_created_at, cursor.last_session_id)
        found = [session for session in found if _place(session) < last]
    shown = found[: request.limit]
    content: dict[str, Any] = {"sessions": [_summary(world, session) for session in shown]}
    if len(found) > len(shown):
        content["next_cursor"] = {
            "last_created_at": shown[-1].created_at,
            "last_session_id": shown[-1].session_id,
        }
    return content


def _place(session: Session) -> tuple[datetime, str]:
    return session.created_at, session.session_id


def _is_visible(session: Session, tenant: str, owner: types.SearchOwner) -> bool:
    # There are no teams here: nobody may list another tenant's sessions.
    if session.tenant != tenant:
        return False
    return not isinstance(owner, types.UserSearchOwner) or owner_urn(tenant) in owner.owner_urns


def _fits(session: Session, request: types.SessionSearchRequest) -> bool:
    if request.project_ids is not None and session.project_id not in request.project_ids:
        return False
    metadata = session.user_metadata
    if any(metadata.get(key) != value for key, value in request.user_metadata.items()):
        return False
    return _is_named(session, request) and _is_in_state(session, request)


def _is_named(session: Session, request: types.SessionSearchRequest) -> bool:
    """Of an id and a name one is enough; with neither, every session fits."""
    if request.session_id is None and request.display_name is None:
        return True
    if session.session_id == request.session_id:
        return True
    if request.display_name is None:
        return False
    name = (session.display_name or "").lower()
    return all(word in name for word in request.display_name.lower().split())


def _is_in_state(session: Session, request: types.SessionSearchRequest) -> bool:
    if request.statuses is None:
        return True
    for query in request.statuses:
        if isinstance(query, types.ClientFinishedSessionStatusQuery):
            reasons = query.reasons or ("success", "errored", "interrupted")
            if session.finish_reason in reasons:
                return True
        elif query.type == "active" and session.finish_reason is None:
            return True
    return False


def _summary(world: World, session: Session) -> dict[str, Any]:
    runs = {model.model_id for model in world.models.values() if model.session is session}
    checkpoints = [
        checkpoint
        for checkpoint in world.vault.owned(session.tenant)
        if checkpoint.path.run_id in runs
    ]
    return {
        "session_id": session.session_id,
        "created_at": session.created_at,
        "owner": owner_urn(session.tenant),
        "project_id": session.project_id,
        "status": _status(session),
        "checkpoints_count": len(checkpoints),
        "display_name": session.display_name,
        "user_metadata": session.user_metadata,
        "checkpoint_storage_bytes": sum(checkpoint.size_bytes for checkpoint in checkpoints),
    }


def _status(session: Session) -> dict[str, Any]:
    if session.finish_reason is None:
        return {"type": "active"}
    return {
        "type": "client_finished",
        "reason": {"type": session.finish_reason},
        "detail": session.finish_detail,
    }
