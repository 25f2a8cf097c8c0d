"""Service endpoints: health, capabilities, client flags, credentials, telemetry."""

from __future__ import annotations

from typing import get_args

from tinkex import clock, types
from tinkex.errors import NotFoundError
from tinkex.server.http.auth import issue_token
from tinkex.server.http.model_specs import list_served_models
from tinkex.server.http.prometheus import TELEMETRY_EVENTS
from tinkex.server.http.request_context import Handler, RawResponse, RequestContext, Services
from tinkex.server.http.router import LenientTelemetry
from tinkex.server.http.store_access import read, write
from tinkex.store import keys
from tinkex.store.database import Connection
from tinkex.types.telemetry import EventType
from tinkex.wire.messages import ApiKeyReply

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
    flags: dict[str, object] = {
        "pjwt_auth_enabled": config.jwt,
        "parallel_fwdbwd_chunks": True,
        "custom_loss_server_side": config.custom_losses,
    }
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


# --- telemetry -----------------------------------------------------------------------------
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
    "telemetry": telemetry,
}
