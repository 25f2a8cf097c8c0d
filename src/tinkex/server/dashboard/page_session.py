"""Sessions of the pages: who visits them, and which requests of their scripts are accepted.

A script of a page calls the endpoints of the API with the session cookie, or without it on the
server's own machine, and with the CSRF token of the page in a header. The middleware here exchanges
both for a credential, so that endpoints see the same request as from any other client.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from tinkex.errors import AuthenticationError, PermissionDeniedError
from tinkex.server.config import DEFAULT_TENANT
from tinkex.server.http.auth import identify, issue_token
from tinkex.server.http.error_responses import HANDLED_ERRORS, response_for_error
from tinkex.server.http.request_context import CallerIdentity, Services
from tinkex.server.http.request_origin import (
    RequestOrigin,
    is_local,
    is_page_script,
    read_origin,
)
from tinkex.server.http.router import send_response
from tinkex.server.http.store_access import read
from tinkex.store import keys
from tinkex.store.records import TenantRecord

COOKIE_NAME = "tinkex_look"
CSRF_HEADER = b"x-csrf-token"
_CREDENTIAL_HEADERS = frozenset({b"x-api-key", b"authorization"})
FOREIGN_ORIGIN = "the request was sent from another site; open the page yourself and try again"
INVALID_TOKEN = "the page is out of date; reload it and try again"
NO_SESSION = "you are not logged in, or the login has expired; reload the page and log in"
NO_LOCAL_KEY = "the server has no API key for local pages; log in with a key"
#: Lifetime of the credential of one request of a local page; an answer may be a long stream.
_LOCAL_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """The tenant whose resources the pages show."""

    tenant: TenantRecord
    is_local: bool
    """Whether access was granted without a key, from the server's own machine."""
    csrf_token: str
    """What scripts of the page send with their requests."""

    @property
    def is_operator(self) -> bool:
        """Whether the visitor is the owner of the server's home."""
        return self.tenant.name == DEFAULT_TENANT


async def find_visitor(services: Services, origin: RequestOrigin) -> Visitor | None:
    """Identify the visitor of a page; None if a login is required."""
    cookie = origin.cookie(COOKIE_NAME)
    identity = await identify(services, cookie) if cookie else None
    if identity is not None and cookie is not None:
        tenant_id = identity.tenant_id
        tenant = await read(services, lambda db: keys.find_tenant(db, tenant_id))
        token = csrf_token(services.secret, cookie)
        if tenant is None:
            return None
        return Visitor(tenant=tenant, is_local=False, csrf_token=token)
    if not is_local(services.config.host, origin):
        return None
    tenant = await read(services, lambda db: keys.find_tenant_by_name(db, DEFAULT_TENANT))
    if tenant is None:
        return None
    return Visitor(
        tenant=tenant, is_local=True, csrf_token=_local_csrf_token(services.secret, tenant)
    )


def csrf_token(secret: bytes, session: str) -> str:
    """The CSRF token of a session; another site cannot compute or read it."""
    key = hmac.digest(secret, b"csrf", "sha256")
    return hmac.new(key, session.encode(), hashlib.sha256).hexdigest()


def _local_csrf_token(secret: bytes, tenant: TenantRecord) -> str:
    # A cookie never contains a space, so that this differs from every session.
    return csrf_token(secret, f"local {tenant.id}")


class PageSessionMiddleware:
    """Exchanges the session and the CSRF token of a page's script for a credential."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; requests of other clients are passed on unchanged."""
        if scope["type"] == ScopeType.HTTP and _is_from_page(scope):
            try:
                credential = await _find_credential(self._services, scope)
            except HANDLED_ERRORS as error:
                await send_response(response_for_error(error), send)
                return
            scope["headers"] = [*scope["headers"], (b"x-api-key", credential.encode())]
        await self._app(scope, receive, send)


def _is_from_page(scope: HTTPScope) -> bool:
    names = {name.lower() for name, _ in scope["headers"]}
    return CSRF_HEADER in names and not names & _CREDENTIAL_HEADERS


async def _find_credential(services: Services, scope: HTTPScope) -> str:
    """Return the credential of the page's visitor; raises if the request is not accepted."""
    origin = read_origin(scope)
    if not is_page_script(origin, scope["method"]):
        raise PermissionDeniedError(FOREIGN_ORIGIN)
    visitor = await find_visitor(services, origin)
    if visitor is None:
        raise AuthenticationError(NO_SESSION)
    sent = origin.header(CSRF_HEADER.decode()) or ""
    if not hmac.compare_digest(sent.encode(), visitor.csrf_token.encode()):
        raise PermissionDeniedError(INVALID_TOKEN)
    if visitor.is_local:
        return await _issue_local_token(services, visitor.tenant)
    return origin.cookie(COOKIE_NAME) or ""


async def _issue_local_token(services: Services, tenant: TenantRecord) -> str:
    """Return a token of the default tenant; it belongs to one of the tenant's keys."""
    key_id = await read(services, lambda db: keys.find_active_id(db, tenant.id))
    if key_id is None:
        raise AuthenticationError(NO_LOCAL_KEY)
    identity = CallerIdentity(tenant_id=tenant.id, key_id=key_id)
    return issue_token(services.secret, identity, tenant, _LOCAL_SECONDS)
