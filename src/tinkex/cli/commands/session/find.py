"""Find sessions by search, or by plain lists on servers without search."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tinkex.cli.errors import CliError
from tinkex.errors import APIStatusError, ExperimentalWarning, NotFoundError

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.types import SessionSearchCursor, SessionSearchRequest, SessionSearchResponse

#: Maximum page size of the server.
PAGE_SIZE = 200
#: Status codes of a server without search.
NO_SEARCH = frozenset({404, 405, 501})
SessionScope = Literal["owned", "accessible"]
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """Conditions on sessions."""

    scope: SessionScope = "owned"
    statuses: tuple[str, ...] = ()
    project_ids: tuple[str, ...] = ()
    name: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def is_filtered(self) -> bool:
        """Whether the filter needs a search."""
        return bool(self.statuses or self.project_ids or self.name or self.metadata)


@dataclass(frozen=True, slots=True)
class SessionPage:
    """The first sessions of a list."""

    sessions: list[dict[str, object]]
    has_more: bool


def find_sessions(
    client: RestClient, filters: SessionFilter, limit: int, on_progress: ProgressCallback
) -> SessionPage:
    """Return the newest `limit` matching sessions (0: all)."""
    try:
        return _search_sessions(client, filters, limit, on_progress)
    except APIStatusError as error:
        if error.status not in NO_SEARCH:
            raise
        if filters.is_filtered:
            raise CliError(
                "this server cannot search sessions",
                "Remove --status, --project-id, --name and --metadata to list all sessions.",
            ) from error
    return _list_sessions(client, filters.scope, limit)


def find_session(
    client: RestClient, session_id: str, scope: SessionScope = "owned"
) -> dict[str, object]:
    """Fetch a session with its runs and samplers, and its status if the server reports it."""
    try:
        session = client.get_session(session_id, scope).result()
    except NotFoundError as error:
        raise session_not_found_error(session_id) from error
    data = {"session_id": session_id} | session.model_dump()
    request = _build_request(SessionFilter(scope=scope), 1, session_id=session_id)
    try:
        page = _call_search(client, request).sessions
    except APIStatusError as error:
        if error.status not in NO_SEARCH:
            raise
        page = []
    summary = page[0].model_dump() if page and page[0].session_id == session_id else {}
    return data | {key: value for key, value in summary.items() if key not in data}


def session_not_found_error(session_id: str) -> CliError:
    """Create the error for an unknown session."""
    return CliError(
        f"Session not found: {session_id}", "`tinkex session list` lists your sessions."
    )


def _search_sessions(
    client: RestClient, filters: SessionFilter, limit: int, on_progress: ProgressCallback
) -> SessionPage:
    sessions: list[dict[str, object]] = []
    cursor = None
    while True:
        size = min(PAGE_SIZE, limit - len(sessions)) if limit else PAGE_SIZE
        page = _call_search(client, _build_request(filters, size, cursor=cursor))
        sessions += [row.model_dump() for row in page.sessions]
        cursor = page.next_cursor
        on_progress(len(sessions), max(limit, len(sessions) + (cursor is not None)))
        if cursor is None or not page.sessions or (limit and len(sessions) >= limit):
            return SessionPage(sessions, cursor is not None)


def _list_sessions(client: RestClient, scope: SessionScope, limit: int) -> SessionPage:
    ids: list[str] = []
    while True:
        # Fetch one more than needed to know whether there are more.
        size = min(PAGE_SIZE, limit + 1 - len(ids)) if limit else PAGE_SIZE
        page = client.list_sessions(size, len(ids), scope).result().sessions
        ids += page
        if not page or (limit and len(ids) > limit):
            break
    shown = ids[:limit] if limit else ids
    return SessionPage([{"session_id": name} for name in shown], len(shown) < len(ids))


def _call_search(client: RestClient, request: SessionSearchRequest) -> SessionSearchResponse:
    with warnings.catch_warnings():
        # If the service changes this experimental endpoint, the plain list is used.
        warnings.simplefilter("ignore", ExperimentalWarning)
        return client.search_sessions(request).result()


def _build_request(
    filters: SessionFilter,
    limit: int,
    *,
    session_id: str | None = None,
    cursor: SessionSearchCursor | None = None,
) -> SessionSearchRequest:
    from tinkex import types

    owners: dict[str, types.SearchOwner] = {
        "owned": types.OwnSearchOwner(),
        "accessible": types.AccessibleSearchOwner(),
    }
    kinds: dict[str, types.SessionStatusQuery] = {
        "active": types.ActiveSessionStatusQuery(),
        "finished": types.ClientFinishedSessionStatusQuery(),
        "failed": types.FailedSessionStatusQuery(),
        "cancelled": types.CancelledSessionStatusQuery(),
    }
    return types.SessionSearchRequest(
        owner=owners[filters.scope],
        statuses=[kinds[name] for name in filters.statuses] or None,
        project_ids=list(filters.project_ids) or None,
        display_name=filters.name,
        user_metadata=dict(filters.metadata),
        limit=limit,
        session_id=session_id,
        cursor=cursor,
    )
