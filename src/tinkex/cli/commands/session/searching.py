"""Finding sessions: by search where a server can, by plain lists where it cannot."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tinkex.cli.errors import CliError
from tinkex.errors import APIStatusError, ExperimentalWarning, NotFoundError

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.types import SessionSearchRequest

#: The largest page that a server gives.
PAGE_SIZE = 200
#: Answers of a server that has no search.
NO_SEARCH = frozenset({404, 405, 501})
Scope = Literal["owned", "accessible"]
Told = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which sessions are asked for."""

    scope: Scope = "owned"
    statuses: tuple[str, ...] = ()
    project_ids: tuple[str, ...] = ()
    name: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def is_filtered(self) -> bool:
        """Whether a plain list would not do."""
        return bool(self.statuses or self.project_ids or self.name or self.metadata)


@dataclass(frozen=True, slots=True)
class Found:
    """The first sessions of a list."""

    sessions: list[dict[str, Any]]
    has_more: bool


def find_sessions(client: RestClient, wanted: Wanted, limit: int, told: Told) -> Found:
    """The newest sessions that fit, 0 for all of them."""
    try:
        return _search(client, wanted, limit, told)
    except APIStatusError as error:
        if error.status not in NO_SEARCH:
            raise
        if wanted.is_filtered:
            raise CliError(
                "this server has no search for sessions",
                "Leave out --status, --project-id, --name and --metadata to list them all.",
            ) from error
    return _list(client, wanted.scope, limit)


def find_session(client: RestClient, session_id: str, scope: Scope = "owned") -> dict[str, Any]:
    """One session: what it made, and how it is doing if the server says so."""
    try:
        made = client.get_session(session_id, scope).result()
    except NotFoundError as error:
        raise no_session(session_id) from error
    about = {"session_id": session_id} | made.model_dump()
    request = _request(Wanted(scope=scope), 1, session_id=session_id)
    try:
        page = _ask(client, request).sessions
    except APIStatusError as error:
        if error.status not in NO_SEARCH:
            raise
        page = []
    summary = page[0].model_dump() if page and page[0].session_id == session_id else {}
    return about | {key: value for key, value in summary.items() if key not in about}


def no_session(session_id: str) -> CliError:
    """What to say when there is no such session."""
    return CliError(f"Session not found: {session_id}", "`tinkex session list` shows yours.")


def _search(client: RestClient, wanted: Wanted, limit: int, told: Told) -> Found:
    sessions: list[dict[str, Any]] = []
    cursor = None
    while True:
        size = min(PAGE_SIZE, limit - len(sessions)) if limit else PAGE_SIZE
        page = _ask(client, _request(wanted, size, cursor=cursor))
        sessions += [row.model_dump() for row in page.sessions]
        cursor = page.next_cursor
        told(len(sessions), max(limit, len(sessions) + (cursor is not None)))
        if cursor is None or not page.sessions or (limit and len(sessions) >= limit):
            return Found(sessions, cursor is not None)


def _list(client: RestClient, scope: Scope, limit: int) -> Found:
    ids: list[str] = []
    while True:
        # One more than wanted says whether there are more.
        size = min(PAGE_SIZE, limit + 1 - len(ids)) if limit else PAGE_SIZE
        page = client.list_sessions(size, len(ids), scope).result().sessions
        ids += page
        if not page or (limit and len(ids) > limit):
            break
    shown = ids[:limit] if limit else ids
    return Found([{"session_id": name} for name in shown], len(shown) < len(ids))


def _ask(client: RestClient, request: SessionSearchRequest) -> Any:
    with warnings.catch_warnings():
        # The service may change it; then the plain list is there.
        warnings.simplefilter("ignore", ExperimentalWarning)
        return client.search_sessions(request).result()


def _request(wanted: Wanted, limit: int, **more: Any) -> SessionSearchRequest:
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
        owner=owners[wanted.scope],
        statuses=[kinds[name] for name in wanted.statuses] or None,
        project_ids=list(wanted.project_ids) or None,
        display_name=wanted.name,
        user_metadata=dict(wanted.metadata),
        limit=limit,
        **more,
    )
