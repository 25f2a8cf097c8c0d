"""Service endpoints: health, capabilities, client flags, credentials, sessions, telemetry."""

from __future__ import annotations

from typing import get_args

from tinkex import clock, types
from tinkex.errors import NotFoundError, PromiseExpiredError
from tinkex.ids import new_id
from tinkex.server.http.auth import issue_token
from tinkex.server.http.model_specs import list_served_models
from tinkex.server.http.ownership import require_session
from tinkex.server.http.prometheus import TELEMETRY_EVENTS
from tinkex.server.http.request_context import Handler, RawResponse, RequestContext, Services
from tinkex.server.http.router import LenientTelemetry
from tinkex.server.http.store_access import read, record_event, write
from tinkex.server.http.validation import check_label, check_project, check_tags
from tinkex.store import idempotency, keys, sessions
from tinkex.store.database import Connection
from tinkex.store.records import SessionRecord
from tinkex.types.telemetry import EventType
from tinkex.wire.messages import ApiKeyReply, FinishSessionRequest

DEFAULT_PROJECT = "default"
#: A longer detail of a finished session is cut: a client that ends could not react to an error.
MAX_DETAIL_CHARS = 4096
#: Events counted by name; clients could send any number of other names.
_EVENT_TYPES = frozenset(get_args(EventType))
_OK_RESPONSE = RawResponse(body=b'{"status":"ok"}')
_ACCEPTED_RESPONSE = RawResponse(body=b'{"status":"accepted"}')


async def health(services: Services, context: RequestContext[object]) -> RawResponse:
    """Return 200 while the server is up."""
    return _OK_RESPONSE


async def capabilities(
    services: Services, context: RequestContext[object]
) -> types.GetServerCapabilitiesResponse:
    """List the base models that the worker serves."""
    models = await read(services, list_served_models)
    return types.GetServerCapabilitiesResponse(
        supported_models=[
            types.SupportedModel(
                model_name=model.name,
                max_context_length=model.max_context_tokens,
                trainable=model.is_trainable,
                sampleable=model.is_sampleable,
            )
            for model in models
        ]
    )


async def client_config(
    services: Services, context: RequestContext[types.ClientConfigRequest]
) -> dict[str, object]:
    """Return the flags that a client reads at startup."""
    config = services.config
    flags: dict[str, object] = {"pjwt_auth_enabled": config.jwt, "parallel_fwdbwd_chunks": True}
    return flags | dict(config.client_flags)


async def dynamic_config(
    services: Services, context: RequestContext[types.ClientConfigRequest]
) -> dict[str, object]:
    """Return the flags that a client polls."""
    return {"sample_cancel_enabled": True, **services.config.dynamic_flags}


# --- credentials ---------------------------------------------------------------------------
async def auth_token(
    services: Services, context: RequestContext[object]
) -> types.AuthTokenResponse:
    """Exchange an API key or token for a new token; a token's expiry is not extended."""
    tenant = await read(services, lambda db: keys.find_tenant(db, context.tenant_id))
    if tenant is None:
        raise NotFoundError("the account does not exist")
    seconds = services.config.jwt_seconds
    return types.AuthTokenResponse(
        jwt=issue_token(services.secret, context.identity, tenant, seconds)
    )


async def get_api_key(services: Services, context: RequestContext[object]) -> ApiKeyReply:
    """Describe the caller's API key and tenant."""

    def query(db: Connection) -> ApiKeyReply:
        key = keys.find_by_id(db, context.identity.key_id)
        tenant = keys.find_tenant(db, context.tenant_id)
        if key is None or tenant is None:
            raise NotFoundError("the API key does not exist")
        email = tenant.name if "@" in tenant.name else ""
        details = {"org_details": {"name": tenant.name}, "user_details": {"email": email}}
        return ApiKeyReply(key_id=key.id, name=key.name, note=key.note or "", details=details)

    return await read(services, query)


async def delete_api_key(services: Services, context: RequestContext[object]) -> dict[str, object]:
    """Revoke the caller's API key."""
    now = clock.now()

    await write(services, lambda db: keys.revoke(db, context.identity.key_id, now))
    services.cache.identities.clear()
    return {}


# --- sessions ------------------------------------------------------------------------------
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

    await write(services, transaction)
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


async def telemetry(services: Services, context: RequestContext[LenientTelemetry]) -> RawResponse:
    """Count telemetry events; none are stored, because they may contain secrets."""
    for event in context.request.events:
        TELEMETRY_EVENTS.labels(event.event if event.event in _EVENT_TYPES else "other").inc()
    return _ACCEPTED_RESPONSE


ROUTES: dict[str, Handler] = {
    "health": health,
    "get_server_capabilities": capabilities,
    "client_config": client_config,
    "client_dynamic_config": dynamic_config,
    "auth_token": auth_token,
    "get_api_key": get_api_key,
    "delete_api_key": delete_api_key,
    "create_session": create_session,
    "session_heartbeat": heartbeat,
    "finish_session": finish_session,
    "telemetry": telemetry,
}
