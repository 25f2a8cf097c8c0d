"""Where a request comes from, to decide trust: peer address, Host header, proxies, scheme."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from litestar import Request
from litestar.datastructures import State
from litestar.types import HTTPScope

from tinkex.system.addresses import is_ip_address, is_loopback

HttpRequest: TypeAlias = Request[object, object, State]
"""A Litestar request; users and sessions of Litestar are not used."""

#: Host names of loopback. Any other name may belong to another site that points it here.
_PORT = r"(:[0-9]{1,5})?"
_LOOPBACK_HOST = re.compile(rf"(localhost|127\.0\.0\.1|\[::1\]){_PORT}", re.IGNORECASE)
_PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOrigin:
    """The properties of a request that decide whether it is trusted."""

    peer: str
    """The address at the other end of the connection."""
    http_version: str
    headers: tuple[tuple[str, str], ...]
    """Headers with lower-case names."""
    scheme: str = "http"
    address: str = ""
    """The local address of the connection."""

    def header_values(self, name: str) -> list[str]:
        """All values of a header."""
        return [value for key, value in self.headers if key == name]

    def header(self, name: str) -> str | None:
        """The first value of a header."""
        return next(iter(self.header_values(name)), None)

    def cookie(self, name: str) -> str | None:
        """The value of a cookie."""
        for line in self.header_values("cookie"):
            for pair in line.split(";"):
                key, _, value = pair.strip().partition("=")
                if key == name:
                    return value
        return None


def read_origin(scope: HTTPScope) -> RequestOrigin:
    """Read the origin of a request."""
    client = scope.get("client")
    return RequestOrigin(
        peer=client[0] if client else "",
        http_version=str(scope.get("http_version", "")),
        headers=tuple(
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in scope["headers"]
        ),
        scheme=scope["scheme"],
        address=(scope.get("server") or ("",))[0],
    )


def is_local(listen_host: str, origin: RequestOrigin) -> bool:
    """Whether the server listens only on loopback and the request comes from this machine.

    Other servers always require a key for the dashboard.
    """
    return is_loopback(listen_host) and is_from_this_machine(origin)


def is_from_this_machine(origin: RequestOrigin) -> bool:
    """Whether a request comes from this machine without a proxy and has its name as Host.

    The Host check prevents DNS rebinding: a web site can resolve its own name to loopback and make
    a browser on this machine send requests here.
    """
    # A peer with the server's own address is on this machine too.
    is_own_address = is_ip_address(origin.address) and origin.peer == origin.address
    if not is_loopback(origin.peer) and not is_own_address:
        return False
    hosts = origin.header_values("host")
    if len(hosts) != 1 or not _is_own_host(hosts[0], origin.address):
        return False
    return not _is_proxied(origin)


def _is_own_host(host: str, address: str) -> bool:
    if _LOOPBACK_HOST.fullmatch(host):
        return True
    literal = f"[{address}]" if ":" in address else address
    # Another site can make a host name resolve to this machine, but not an address.
    return is_ip_address(address) and re.fullmatch(re.escape(literal) + _PORT, host) is not None


def _is_proxied(origin: RequestOrigin) -> bool:
    names = {name for name, _ in origin.headers}
    if names & _PROXY_HEADERS or any(name.startswith("x-forwarded") for name in names):
        return True
    # Browsers do not send HTTP/1.0; a proxy with default settings may.
    return origin.http_version == "1.0"


def is_same_origin(request_origin: RequestOrigin) -> bool:
    """Whether a form was sent from a page of this server, according to the browser's headers."""
    site = request_origin.header("sec-fetch-site")
    if site is not None:
        return site in {"same-origin", "none"}
    return request_origin.header("origin") is None or _is_own_origin(request_origin)


def is_page_script(origin: RequestOrigin, method: str) -> bool:
    """Whether a request was sent by a script of a page of this server.

    Browsers send Origin with every request that may change something.
    """
    site = origin.header("sec-fetch-site")
    if site is not None and site != "same-origin":
        return False
    if origin.header("origin") is None:
        return method in {"GET", "HEAD"}
    return _is_own_origin(origin)


def _is_own_origin(request_origin: RequestOrigin) -> bool:
    _, _, netloc = (request_origin.header("origin") or "").partition("://")
    return netloc in {request_origin.header("host"), request_origin.header("x-forwarded-host")}


def is_https(origin: RequestOrigin) -> bool:
    """Whether the browser uses https, to this server or to a proxy in front of it."""
    return origin.scheme == "https" or origin.header("x-forwarded-proto") == "https"
