"""Login with an API key and logout: the pages' session cookie is a short-lived token."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from litestar import Response
from litestar.datastructures import Cookie
from litestar.enums import HttpMethod
from litestar.handlers import post, route

from tinkex.errors import APIStatusError, InvalidInput, StoreError
from tinkex.ids import check_id, path_segment
from tinkex.server.dashboard.navigation import PAGE_PATHS
from tinkex.server.dashboard.page_session import COOKIE_NAME
from tinkex.server.dashboard.rendering import PAGE_HEADERS, page_response
from tinkex.server.http.auth import MAX_CREDENTIAL_CHARS, identify, issue_token
from tinkex.server.http.request_body import ClientDisconnected, read_body
from tinkex.server.http.request_context import CallerIdentity, Services
from tinkex.server.http.request_origin import (
    HttpRequest,
    RequestOrigin,
    is_https,
    is_same_origin,
    read_origin,
)
from tinkex.server.http.store_access import read
from tinkex.store import keys

INVALID_KEY = "This key is wrong or was revoked."
CROSS_SITE_FORM = "The form was sent from another site. Open this page yourself and try again."
#: Lifetime of a login, unless the server's tokens expire earlier.
MAX_LOGIN_SECONDS = 12 * 3600.0
_MAX_FORM_BYTES = 2 * MAX_CREDENTIAL_CHARS
_FORM_SECONDS = 20.0


def login_page(target: str = "/", *, status: int = 401, message: str = "") -> Response[str]:
    """The login form; it redirects to `target` afterwards."""
    return page_response("login.html", status=status, message=message, target=target)


def safe_target(requested: str) -> str:
    """The redirect target after the login: always a page of this server."""
    if requested in PAGE_PATHS:
        return requested
    try:
        run_id = check_id("run id", requested.removeprefix("/runs/"))
    except InvalidInput:
        return "/"
    return f"/runs/{path_segment(run_id)}" if requested.startswith("/runs/") else "/"


@route("/login", http_method=[HttpMethod.GET, HttpMethod.HEAD], name="login", sync_to_thread=False)
def show_login(request: HttpRequest) -> Response[str]:
    """Show the login form."""
    return login_page(status=200)


@post("/login", name="check_login")
async def login(request: HttpRequest) -> Response[Any]:
    """Check a key and set the login cookie."""
    services: Services = request.app.state.services
    origin = read_origin(request.scope)
    if not is_same_origin(origin):
        return login_page(status=403, message=CROSS_SITE_FORM)
    try:
        form = await _read_form(request, origin)
        target = safe_target(form.get("target", "/"))
        token = await _exchange_key(services, form.get("key", "").strip())
    except (APIStatusError, StoreError) as error:
        status = error.status_code if isinstance(error, APIStatusError) else 503
        return login_page(status=status, message=error.message)
    if token is None:
        return login_page(target, message=INVALID_KEY)
    return _redirect(target, _cookie(token, _login_seconds(services), origin))


@post("/logout", name="logout", sync_to_thread=False)
def logout(request: HttpRequest) -> Response[Any]:
    """Remove the login cookie."""
    origin = read_origin(request.scope)
    if not is_same_origin(origin):
        return login_page(status=403, message=CROSS_SITE_FORM)
    return _redirect("/", _cookie("", 0, origin))


async def _read_form(request: HttpRequest, origin: RequestOrigin) -> dict[str, str]:
    length = origin.header("content-length")
    try:
        body = await read_body(request.receive, length, _MAX_FORM_BYTES, _FORM_SECONDS)
    except ClientDisconnected:
        return {}
    text = body.decode("utf-8", errors="replace")
    return {name: values[-1] for name, values in parse_qs(text).items()}


async def _exchange_key(services: Services, key: str) -> str | None:
    """Exchange a key for a token; tokens are not accepted, so that a login expires."""
    identity = await identify(services, key) if key.startswith(keys.KEY_PREFIX) else None
    return None if identity is None else await _issue_token(services, identity)


async def _issue_token(services: Services, identity: CallerIdentity) -> str | None:
    tenant = await read(services, lambda db: keys.find_tenant(db, identity.tenant_id))
    if tenant is None:
        return None
    return issue_token(services.secret, identity, tenant, _login_seconds(services))


def _login_seconds(services: Services) -> int:
    return int(min(services.config.jwt_seconds, MAX_LOGIN_SECONDS))


def _cookie(token: str, seconds: int, origin: RequestOrigin) -> Cookie:
    return Cookie(
        key=COOKIE_NAME,
        value=token,
        max_age=seconds,
        path="/",
        httponly=True,
        samesite="strict",
        secure=is_https(origin),
    )


def _redirect(target: str, cookie: Cookie) -> Response[Any]:
    headers = {**PAGE_HEADERS, "location": target}
    return Response(None, status_code=303, headers=headers, cookies=[cookie])
