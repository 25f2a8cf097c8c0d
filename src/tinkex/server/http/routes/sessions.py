"""Session endpoints: lists, search, projects and traces."""

from __future__ import annotations

from tinkex import clock, types
from tinkex.server.http.downloads import FileArea, FileRef, sign_url
from tinkex.server.http.ownership import require_session
from tinkex.server.http.request_context import Handler, RawResponse, RequestContext, Services
from tinkex.server.http.serializers import serialize_session, stringify_metadata
from tinkex.server.http.store_access import read, record_event, write
from tinkex.server.http.validation import check_project, parse_page
from tinkex.store import runs, samplers, sessions
from tinkex.store.database import Connection
from tinkex.wire.messages import AssignProjectRequest, TraceExportReply

DEFAULT_LIMIT = 20
TRACE_NAME = "trace.json"


async def list_sessions(
    services: Services, context: RequestContext[object]
) -> types.ListSessionsResponse:
    """List a page of session ids, newest first."""
    limit, offset = parse_page(context, DEFAULT_LIMIT)
    session_ids = await read(
        services, lambda db: sessions.list_ids(db, context.tenant_id, limit=limit, offset=offset)
    )
    return types.ListSessionsResponse(sessions=session_ids)


async def get_session(
    services: Services, context: RequestContext[object]
) -> types.GetSessionResponse:
    """Return the runs and sampling sessions of a session."""

    def query(db: Connection) -> types.GetSessionResponse:
        session = require_session(db, context.tenant_id, context.ids["session_id"])
        return types.GetSessionResponse(
            training_run_ids=[run.id for run in runs.list_by_session(db, session.id)],
            sampler_ids=[sampler.id for sampler in samplers.list_by_session(db, session.id)],
            user_metadata=stringify_metadata(session.user_metadata),
            display_name=session.display_name,
        )

    return await read(services, query)


async def search_sessions(
    services: Services, context: RequestContext[types.SessionSearchRequest]
) -> types.SessionSearchResponse:
    """List a page of the caller's sessions that match a search."""
    identity = context.identity
    page = await read(
        services,
        lambda db: sessions.search(db, identity.tenant_id, identity.urn, context.request),
    )
    return types.SessionSearchResponse(
        sessions=[serialize_session(row) for row in page.sessions],
        next_cursor=page.next_cursor,
    )


async def assign_project(
    services: Services, context: RequestContext[AssignProjectRequest]
) -> RawResponse:
    """Assign a session and its checkpoints to a project."""
    project_id = check_project(context.request.project_id)

    def transaction(db: Connection) -> None:
        session = require_session(db, context.tenant_id, context.ids["session_id"])
        sessions.assign_project(db, session.id, project_id)
        record_event(
            db,
            context.identity,
            "project_assigned",
            session_id=session.id,
            project_id=project_id,
            previous_project_id=session.project_id,
        )

    await write(services, transaction)
    return RawResponse()


async def trace_export(services: Services, context: RequestContext[object]) -> TraceExportReply:
    """Return the signed URL of a session's trace, which is generated on download."""
    session_id = context.ids["session_id"]
    await read(services, lambda db: require_session(db, context.tenant_id, session_id))
    expires = int(clock.now() + services.config.url_seconds)
    file_ref = FileRef(FileArea.TRACE, session_id, TRACE_NAME)
    url = sign_url(services.secret, context.base_url, file_ref, expires)
    return TraceExportReply(status="ready", url=url)


ROUTES: dict[str, Handler] = {
    "list_sessions": list_sessions,
    "get_session": get_session,
    "search_sessions": search_sessions,
    "assign_session_project": assign_project,
    "export_session_trace": trace_export,
}
