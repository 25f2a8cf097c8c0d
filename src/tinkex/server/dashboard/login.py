"""The door: a key is shown once, and a cookie that expires stands for it."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from litestar import Request, Response
from litestar.datastructures import Cookie
from litestar.enums import HttpMethod
from litestar.handlers import post, route

from tinkex.errors import APIStatusError, InvalidInput, StoreError
from tinkex.ids import check_id, path_segment
from tinkex.server.arrivals import Arrival, arrival_of, is_encrypted, is_own_form
from tinkex.server.auth import MAX_CREDENTIAL_CHARS, identify, issue_token
from tinkex.server.call import Identity, Services
from tinkex.server.dashboard.rendering import HEADERS, page
from tinkex.server.dashboard.visitor import COOKIE
from tinkex.server.limits import ClientGone, read_body
from tinkex.server.transactions import read
from tinkex.store import keys

WRONG = "This key is wrong or was revoked."
FOREIGN = "The form was sent from another site. Open this page yourself and try again."
#: A look lasts this long, or as long as the server's tokens do.
MAX_SECONDS = 12 * 3600.0
_MAX_FORM_BYTES = 2 * MAX_CREDENTIAL_CHARS
_FORM_SECONDS = 20.0


def ask_for_key(target: str = "/", *, status: int = 401, message: str = "") -> Response[str]:
    """The form, which leads to `target` afterwards."""
    return page("login.html", status=status, message=message, target=target)


def checked_target(given: str) -> str:
    """Where the form leads: a page of ours, whatever was asked for."""
    try:
        run_id = check_id("run id", given.removeprefix("/runs/"))
    except InvalidInput:
        return "/"
    return f"/runs/{path_segment(run_id)}" if given.startswith("/runs/") else "/"


@route("/login", http_method=[HttpMethod.GET, HttpMethod.HEAD], name="login", sync_to_thread=False)
def show_form(request: Request[Any, Any, Any]) -> Response[str]:
    """Ask for a key."""
    return ask_for_key(status=200)


@post("/login", name="check_login")
async def login(request: Request[Any, Any, Any]) -> Response[Any]:
    """Check a key, and remember whose it is in a cookie."""
    services: Services = request.app.state.services
    arrival = arrival_of(request)
    if not is_own_form(arrival):
        return ask_for_key(status=403, message=FOREIGN)
    try:
        form = await _read_form(request, arrival)
        target = checked_target(form.get("target", "/"))
        token = await _exchange(services, form.get("key", "").strip())
    except (APIStatusError, StoreError) as error:
        status = error.status_code if isinstance(error, APIStatusError) else 503
        return ask_for_key(status=status, message=error.message)
    if token is None:
        return ask_for_key(target, message=WRONG)
    return _led_to(target, _cookie(token, _seconds(services), arrival))


@post("/logout", name="logout", sync_to_thread=False)
def logout(request: Request[Any, Any, Any]) -> Response[Any]:
    """Forget who looks."""
    arrival = arrival_of(request)
    if not is_own_form(arrival):
        return ask_for_key(status=403, message=FOREIGN)
    return _led_to("/", _cookie("", 0, arrival))


async def _read_form(request: Request[Any, Any, Any], arrival: Arrival) -> dict[str, str]:
    length = arrival.first("content-length")
    try:
        body = await read_body(request.receive, length, _MAX_FORM_BYTES, _FORM_SECONDS)
    except ClientGone:
        return {}
    text = body.decode("utf-8", errors="replace")
    return {name: values[-1] for name, values in parse_qs(text).items()}


async def _exchange(services: Services, key: str) -> str | None:
    """A token for a key; a token is not prolonged, so that a look ends."""
    identity = await identify(services, key) if key.startswith(keys.KEY_PREFIX) else None
    return None if identity is None else await _token(services, identity)


async def _token(services: Services, identity: Identity) -> str | None:
    tenant = await read(services, lambda db: keys.find_tenant(db, identity.tenant_id))
    if tenant is None:
        return None
    return issue_token(services.secret, identity, tenant, _seconds(services))


def _seconds(services: Services) -> int:
    return int(min(services.config.jwt_seconds, MAX_SECONDS))


def _cookie(token: str, seconds: int, arrival: Arrival) -> Cookie:
    return Cookie(
        key=COOKIE,
        value=token,
        max_age=seconds,
        path="/",
        httponly=True,
        samesite="strict",
        secure=is_encrypted(arrival),
    )


def _led_to(target: str, cookie: Cookie) -> Response[Any]:
    headers = {**HEADERS, "location": target}
    return Response(None, status_code=303, headers=headers, cookies=[cookie])
