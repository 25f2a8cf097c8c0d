"""How a request came here, as far as it matters for trust: from where, for whom, through what."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from litestar import Request

from tinkex.server.listening import is_address, is_loopback

#: The names by which a machine calls itself. Any other may be a stranger's name that leads here.
_PORT = r"(:[0-9]{1,5})?"
_OWN_NAME = re.compile(rf"(localhost|127\.0\.0\.1|\[::1\]){_PORT}", re.IGNORECASE)
_PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How a request came here, as far as it matters for trust."""

    peer: str
    """The address at the other end of the connection."""
    http_version: str
    headers: tuple[tuple[str, str], ...]
    """By lower-case name."""
    scheme: str = "http"
    address: str = ""
    """The address of this machine that the connection was made to."""

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
        address=(request.scope.get("server") or ("",))[0],
    )


def is_local(listens_on: str, arrival: Arrival) -> bool:
    """Whether a request was made on this machine, by its user, directly; for a server only there.

    On other servers a browser's page is not shown without a key, wherever the browser is.
    """
    return is_loopback(listens_on) and is_from_here(arrival)


def is_from_here(arrival: Arrival) -> bool:
    """Whether a request was made on this machine, directly, and names this machine as its host.

    A page of another site can make a browser on this machine send requests here, by a name of
    that site which leads to loopback; the Host header gives it away.
    """
    # A peer with the server's own address is on this machine too.
    is_same = is_address(arrival.address) and arrival.peer == arrival.address
    if not is_loopback(arrival.peer) and not is_same:
        return False
    hosts = arrival.all("host")
    if len(hosts) != 1 or not _names_this_machine(hosts[0], arrival.address):
        return False
    return not _is_passed_on(arrival)


def _names_this_machine(host: str, address: str) -> bool:
    if _OWN_NAME.fullmatch(host):
        return True
    literal = f"[{address}]" if ":" in address else address
    # Another site can point a host name at this machine, but not an address.
    return is_address(address) and re.fullmatch(re.escape(literal) + _PORT, host) is not None


def _is_passed_on(arrival: Arrival) -> bool:
    names = {name for name, _ in arrival.headers}
    if names & _PROXY_HEADERS or any(name.startswith("x-forwarded") for name in names):
        return True
    # No current browser sends HTTP/1.0; a proxy with default settings may.
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
