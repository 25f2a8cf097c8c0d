"""Session endpoints: creation, heartbeats, lists, search, projects and traces."""

from __future__ import annotations

from tinkex import clock, types
from tinkex.errors import PromiseExpiredError
from tinkex.ids import new_id
from tinkex.server.http.downloads import FileArea, FileRef, sign_url
from tinkex.server.http.ownership import require_session
from tinkex.server.http.request_context import Handler, RawResponse, RequestContext, Services
from tinkex.server.http.serializers import serialize_session, stringify_metadata
from tinkex.server.http.store_access import read, record_event, write
from tinkex.server.http.validation import check_label, check_project, check_tags, parse_page
from tinkex.store import idempotency, runs, samplers, sessions
from tinkex.store.database import Connection
from tinkex.store.records import SessionRecord
from tinkex.store.write_locks import SHARED
from tinkex.wire.messages import AssignProjectRequest, FinishSessionRequest, TraceExportReply

DEFAULT_PROJECT = "default"
DEFAULT_LIMIT = 20
TRACE_NAME = "trace.json"
#: A longer detail of a finished session is cut: a client that ends could not react to an error.
MAX_DETAIL_CHARS = 4096


async def create_session(
    services: Services, context: RequestContext[types.CreateSessionRequest]
) -> types.CreateSessionResponse:
    """Create a session; a request with the same idempotency key returns the same session."""
    session = _build_session(context)
    key = context.idempotency_key

    def transaction(db: Connection) -> str:
        if key:
            session_id = idempotency.find_response(db, context.tenant_id, context.endpoint, key)
            if session_id is not None:
                return session_id
        services.quotas.check_session(db, context.tenant_id, session.created_at)
        if key:
            idempotency.save_response(
                db, context.tenant_id, context.endpoint, key, session.id, session.created_at
            )
        sessions.insert(db, session)
        record_event(
            db,
            context.identity,
            "session_created",
            session_id=session.id,
            project_id=session.project_id,
        )
        return session.id

    return types.CreateSessionResponse(session_id=await write(services, transaction))


def _build_session(context: RequestContext[types.CreateSessionRequest]) -> SessionRecord:
    request, now = context.request, clock.now()
    return SessionRecord(
        id=new_id(),
        tenant_id=context.tenant_id,
        project_id=check_project(request.project_id or DEFAULT_PROJECT),
        display_name=check_label("display_name", request.display_name),
        tags=check_tags(request.tags),
        user_metadata=dict(request.user_metadata or {}),
        sdk_version=check_label("sdk_version", request.sdk_version) or "",
        created_at=now,
        seen_at=now,
    )


async def heartbeat(
    services: Services, context: RequestContext[types.SessionHeartbeatRequest]
) -> types.SessionHeartbeatResponse:
    """Record a heartbeat of a session's client; 410 if the session has finished."""
    now = clock.now()

    def transaction(db: Connection) -> None:
        session = require_session(db, context.tenant_id, context.request.session_id)
        if session.finished_at is not None:
            raise PromiseExpiredError(f"session {session.id!r} has finished; create a new one")
        sessions.touch(db, session.id, now)

    await write(services, transaction, SHARED)
    return types.SessionHeartbeatResponse()


async def finish_session(
    services: Services, context: RequestContext[FinishSessionRequest]
) -> dict[str, object]:
    """Finish a session with a reason; the first reason is kept."""
    now = clock.now()
    request = context.request

    def transaction(db: Connection) -> None:
        session = require_session(db, context.tenant_id, context.ids["session_id"])
        if session.finished_at is None:
            detail = request.detail and request.detail[:MAX_DETAIL_CHARS]
            sessions.finish(db, session.id, request.reason.type, detail, now)
            record_event(
                db,
                context.identity,
                "session_finished",
                session_id=session.id,
                reason=request.reason.type,
            )

    await write(services, transaction)
    return {}


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
    "create_session": create_session,
    "session_heartbeat": heartbeat,
    "finish_session": finish_session,
    "list_sessions": list_sessions,
    "get_session": get_session,
    "search_sessions": search_sessions,
    "assign_session_project": assign_project,
    "export_session_trace": trace_export,
}
