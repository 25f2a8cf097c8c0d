"""Sessions: lists, search, projects and traces."""

from __future__ import annotations

from typing import Any

from tinkex import clock, types
from tinkex.server.auditing import note_event
from tinkex.server.call import Answer, Call, Handler, Services
from tinkex.server.checks import check_project, page_of
from tinkex.server.describe import describe_session, texts
from tinkex.server.ownership import session_of
from tinkex.server.signing import Place, Shelf, sign
from tinkex.server.transactions import read, write
from tinkex.store import runs, samplers, searching, sessions
from tinkex.store.database import Connection
from tinkex.wire.messages import AssignProjectRequest, TraceExportReply

DEFAULT_LIMIT = 20
TRACE_NAME = "trace.json"


async def list_sessions(services: Services, call: Call[Any]) -> types.ListSessionsResponse:
    """A page of session ids, newest first."""
    limit, offset = page_of(call, DEFAULT_LIMIT)
    found = await read(
        services, lambda db: sessions.list_ids(db, call.tenant_id, limit=limit, offset=offset)
    )
    return types.ListSessionsResponse(sessions=found)


async def get_session(services: Services, call: Call[Any]) -> types.GetSessionResponse:
    """What belongs to a session."""

    def look(db: Connection) -> types.GetSessionResponse:
        session = session_of(db, call.tenant_id, call.ids["session_id"])
        return types.GetSessionResponse(
            training_run_ids=[run.id for run in runs.list_by_session(db, session.id)],
            sampler_ids=[sampler.id for sampler in samplers.list_by_session(db, session.id)],
            user_metadata=texts(session.user_metadata),
            display_name=session.display_name,
        )

    return await read(services, look)


async def search_sessions(
    services: Services, call: Call[types.SessionSearchRequest]
) -> types.SessionSearchResponse:
    """A page of the caller's sessions that fit."""
    identity = call.identity
    found = await read(
        services,
        lambda db: searching.search(db, identity.tenant_id, identity.urn, call.request),
    )
    return types.SessionSearchResponse(
        sessions=[describe_session(facts) for facts in found.sessions],
        next_cursor=found.next_cursor,
    )


async def assign_project(services: Services, call: Call[AssignProjectRequest]) -> Answer:
    """Move a session to a project, with the checkpoints that it made."""
    project_id = check_project(call.request.project_id)

    def change(db: Connection) -> None:
        session = session_of(db, call.tenant_id, call.ids["session_id"])
        sessions.assign_project(db, session.id, project_id)
        note_event(
            db,
            call.identity,
            "project_assigned",
            session_id=session.id,
            project_id=project_id,
            previous_project_id=session.project_id,
        )

    await write(services, change)
    return Answer()


async def trace_export(services: Services, call: Call[Any]) -> TraceExportReply:
    """The link to a session's trace, which is written while it is fetched."""
    session_id = call.ids["session_id"]
    await read(services, lambda db: session_of(db, call.tenant_id, session_id))
    expires = int(clock.now() + services.config.url_seconds)
    place = Place(Shelf.TRACE, session_id, TRACE_NAME)
    url = sign(services.secret, call.base_url, place, expires)
    return TraceExportReply(status="ready", url=url)


ROUTES: dict[str, Handler] = {
    "list_sessions": list_sessions,
    "get_session": get_session,
    "search_sessions": search_sessions,
    "assign_session_project": assign_project,
    "export_session_trace": trace_export,
}
