"""What the operator changes on the pages: API keys, quotas and base models.

Requests need a credential in a header, as those of the API do. A page's script sends its session
with a CSRF token instead, which `page_session` exchanges for one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from litestar import Response
from litestar.handlers import post
from litestar.types import ControllerRouterHandler

from tinkex import clock
from tinkex.errors import NotFoundError
from tinkex.server.dashboard.administration import (
    create_key,
    require_operator,
    revoke_key,
    set_quotas,
)
from tinkex.server.dashboard.model_additions import choose_candidate, start_addition
from tinkex.server.http.auth import authenticate
from tinkex.server.http.error_responses import HANDLED_ERRORS, response_for_error
from tinkex.server.http.request_body import read_body
from tinkex.server.http.request_context import CallerIdentity, RawResponse, Services
from tinkex.server.http.request_origin import HttpRequest
from tinkex.server.http.store_access import read, record_event, write
from tinkex.store import keys
from tinkex.store.database import Connection
from tinkex.store.records import TenantRecord

MAX_BODY_BYTES = 64 * 1024
_BODY_SECONDS = 20.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action(Generic[T]):
    """An authenticated and decoded request of a page."""

    services: Services
    identity: CallerIdentity
    tenant: TenantRecord
    body: T


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key to create."""

    tenant: str
    name: str
    note: str = ""


class KeyReference(msgspec.Struct, frozen=True, kw_only=True):
    """A key to revoke."""

    id: int


class NewQuotas(msgspec.Struct, frozen=True, kw_only=True):
    """The quotas of a tenant by name; null follows the server's settings."""

    tenant: str
    limits: dict[str, int | None]


class NewModel(msgspec.Struct, frozen=True, kw_only=True):
    """A base model to add: a package, or a folder or GGUF file that the operator has allowed."""

    name: str
    location: str = ""


async def _create_key(action: Action[NewKey]) -> object:
    body, now = action.body, clock.now()
    created = await write(
        action.services,
        lambda db: create_key(db, action.tenant, body.tenant, body.name, body.note, now),
    )
    return {"id": created.key.id, "tenant": created.tenant, "key": created.secret}


async def _revoke_key(action: Action[KeyReference]) -> object:
    key_id, now = action.body.id, clock.now()
    await write(action.services, lambda db: revoke_key(db, action.tenant, key_id, now))
    action.services.cache.identities.clear()
    return {"id": key_id, "revoked": True}


async def _set_quotas(action: Action[NewQuotas]) -> object:
    body = action.body
    await write(
        action.services,
        lambda db: set_quotas(db, action.tenant, action.identity, body.tenant, body.limits),
    )
    return {"tenant": body.tenant}


async def _add_model(action: Action[NewModel]) -> object:
    require_operator(action.tenant)
    services, body = action.services, action.body
    candidate = choose_candidate(services.config, body.name, body.location)
    await start_addition(services, candidate)

    def audit(db: Connection) -> None:
        record_event(db, action.identity, "model_added", name=body.name, location=body.location)

    await write(services, audit)
    return {"name": candidate.name}


async def _run(
    request: HttpRequest, kind: type[T], act: Callable[[Action[T]], Awaitable[object]]
) -> Response[bytes]:
    try:
        action = await _read_action(request, kind)
        response = RawResponse(body=msgspec.json.encode(await act(action)))
    except HANDLED_ERRORS as error:
        response = response_for_error(error)
    # A new key must not stay in a cache.
    headers = {**response.headers, "cache-control": "no-store"}
    return Response(
        response.body,
        status_code=response.status,
        media_type=response.content_type,
        headers=headers,
    )


async def _read_action(request: HttpRequest, kind: type[T]) -> Action[T]:
    services: Services = request.app.state.services
    headers = {name.lower(): value for name, value in request.headers.items()}
    identity = await authenticate(services, headers)
    tenant = await read(services, lambda db: keys.find_tenant(db, identity.tenant_id))
    if tenant is None:
        raise NotFoundError("the account does not exist")
    require_operator(tenant)
    body = await read_body(
        request.receive, headers.get("content-length"), MAX_BODY_BYTES, _BODY_SECONDS
    )
    return Action(
        services=services,
        identity=identity,
        tenant=tenant,
        body=msgspec.json.decode(body, type=kind),
    )


@post("/page/keys", name="create_key")
async def post_key(request: HttpRequest) -> Response[Any]:
    """Create an API key; the response has its secret, which is not shown again."""
    return await _run(request, NewKey, _create_key)


@post("/page/keys/revoke", name="revoke_key")
async def post_revoked_key(request: HttpRequest) -> Response[Any]:
    """Revoke an API key."""
    return await _run(request, KeyReference, _revoke_key)


@post("/page/quotas", name="set_quotas")
async def post_quotas(request: HttpRequest) -> Response[Any]:
    """Set the quotas of a tenant."""
    return await _run(request, NewQuotas, _set_quotas)


@post("/page/models", name="add_model")
async def post_model(request: HttpRequest) -> Response[Any]:
    """Start to add a base model."""
    return await _run(request, NewModel, _add_model)


HANDLERS: list[ControllerRouterHandler] = [post_key, post_revoked_key, post_quotas, post_model]
