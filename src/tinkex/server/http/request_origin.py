"""How a request came here, as far as it matters for trust: from where, for whom, through what."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from litestar import Request

from tinkex.server.config import is_ip_address, is_loopback

#: The names by which a machine calls itself. Any other may be a stranger's name that leads here.
_PORT = r"(:[0-9]{1,5})?"
_LOOPBACK_HOST = re.compile(rf"(localhost|127\.0\.0\.1|\[::1\]){_PORT}", re.IGNORECASE)
_PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOrigin:
    """How a request came here, as far as it matters for trust."""

    peer: str
    """The address at the other end of the connection."""
    http_version: str
    headers: tuple[tuple[str, str], ...]
    """By lower-case name."""
    scheme: str = "http"
    address: str = ""
    """The address of this machine that the connection was made to."""

    def header_values(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name]

    def header(self, name: str) -> str | None:
        """A header's first value."""
        return next(iter(self.header_values(name)), None)


def read_origin(request: Request[Any, Any, Any]) -> RequestOrigin:
    """How a request came here."""
    return RequestOrigin(
        peer=request.client.host if request.client else "",
        http_version=str(request.scope.get("http_version", "")),
        headers=tuple(
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in request.scope["headers"]
        ),
        scheme=request.scope["scheme"],
        address=(request.scope.get("server") or ("",))[0],
    )


def is_local(listen_host: str, origin: RequestOrigin) -> bool:
    """Whether a request was made on this machine, by its user, directly; for a server only there.

    On other servers a browser's page is not shown without a key, wherever the browser is.
    """
    return is_loopback(listen_host) and is_from_this_machine(origin)


def is_from_this_machine(origin: RequestOrigin) -> bool:
    """Whether a request was made on this machine, directly, and names this machine as its host.

    A page of another site can make a browser on this machine send requests here, by a name of
    that site which leads to loopback; the Host header gives it away.
    """
    # A peer with the server's own address is on this machine too.
    is_same = is_ip_address(origin.address) and origin.peer == origin.address
    if not is_loopback(origin.peer) and not is_same:
        return False
    hosts = origin.header_values("host")
    if len(hosts) != 1 or not _is_own_host(hosts[0], origin.address):
        return False
    return not _is_proxied(origin)


def _is_own_host(host: str, address: str) -> bool:
    if _LOOPBACK_HOST.fullmatch(host):
        return True
    literal = f"[{address}]" if ":" in address else address
    # Another site can point a host name at this machine, but not an address.
    return is_ip_address(address) and re.fullmatch(re.escape(literal) + _PORT, host) is not None


def _is_proxied(origin: RequestOrigin) -> bool:
    names = {name for name, _ in origin.headers}
    if names & _PROXY_HEADERS or any(name.startswith("x-forwarded") for name in names):
        return True
    # No current browser sends HTTP/1.0; a proxy with default settings may.
    return origin.http_version == "1.0"


def is_same_origin(request_origin: RequestOrigin) -> bool:
    """Whether a form was sent from our own page, as far as the browser says."""
    site = request_origin.header("sec-fetch-site")
    if site is not None:
        return site in {"same-origin", "none"}
    origin = request_origin.header("origin")
    if origin is None:
        return True
    return urlsplit(origin).netloc in {
        request_origin.header("host"),
        request_origin.header("x-forwarded-host"),
    }


def is_https(origin: RequestOrigin) -> bool:
    """Whether the browser came by https, here or at a proxy."""
    return origin.scheme == "https" or origin.header("x-forwarded-proto") == "https"
