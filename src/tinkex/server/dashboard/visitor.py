"""Who looks at the pages: whoever shows a key, or sits at the machine that serves them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from litestar import Request

from tinkex.server.auth import identify
from tinkex.server.call import Services
from tinkex.server.keys_file import DEFAULT_TENANT
from tinkex.server.listening import is_loopback
from tinkex.server.transactions import read
from tinkex.store import keys, overview
from tinkex.store.records import Tenant

COOKIE = "tinkex_look"
#: The names by which a machine calls itself. Any other may be a stranger's name that leads here.
_OWN_NAME = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Whose things are shown, and why."""

    tenant: Tenant
    is_local: bool
    """Whether no key was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How a request came here, as far as it matters for trust."""

    peer: str
    """The address at the other end of the connection."""
    http_version: str
    headers: tuple[tuple[str, str], ...]
    """By lower-case name."""
    scheme: str = "http"

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name]

    def first(self, name: str) -> str | None:
        """A header's first value."""
        return next(iter(self.all(name)), None)


def arrival_of(request: Request[Any, Any, Any]) -> Arrival:
    """How a request came here."""
    return Arrival(
        peer=request.client.host if request.client else "",
        http_version=str(request.scope.get("http_version", "")),
        headers=tuple(
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in request.scope["headers"]
        ),
        scheme=request.scope["scheme"],
    )


def is_local(listens_on: str, arrival: Arrival) -> bool:
    """Whether a request was made on this machine, by its user, directly."""
    if not is_loopback(listens_on) or not is_loopback(arrival.peer):
        return False
    hosts = arrival.all("host")
    if len(hosts) != 1 or not _OWN_NAME.fullmatch(hosts[0]):
        return False
    return not _is_passed_on(arrival)


def _is_passed_on(arrival: Arrival) -> bool:
    names = {name for name, _ in arrival.headers}
    if names & _PROXY_HEADERS or any(name.startswith("x-forwarded") for name in names):
        return True
    # Browsers have long left it behind; a proxy that was told nothing may still speak it.
    return arrival.http_version == "1.0"


def is_own_form(arrival: Arrival) -> bool:
    """Whether a form was sent from our own page, as far as the browser says."""
    site = arrival.first("sec-fetch-site")
    if site is not None:
        return site in {"same-origin", "none"}
    origin = arrival.first("origin")
    if origin is None:
        return True
    return urlsplit(origin).netloc in {arrival.first("host"), arrival.first("x-forwarded-host")}


def is_encrypted(arrival: Arrival) -> bool:
    """Whether the browser came by https, here or at a proxy."""
    return arrival.scheme == "https" or arrival.first("x-forwarded-proto") == "https"


async def find_visitor(services: Services, request: Request[Any, Any, Any]) -> Visitor | None:
    """Who looks; None if a key must be asked for."""
    token = request.cookies.get(COOKIE)
    identity = await identify(services, token) if token else None
    if identity is not None:
        owner_id = identity.tenant_id
        tenant = await read(services, lambda db: keys.find_tenant(db, owner_id))
        return None if tenant is None else Visitor(tenant=tenant, is_local=False)
    if not is_local(services.config.host, arrival_of(request)):
        return None
    tenant = await read(services, lambda db: overview.find_tenant_named(db, DEFAULT_TENANT))
    return None if tenant is None else Visitor(tenant=tenant, is_local=True)
