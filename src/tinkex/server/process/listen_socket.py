"""The listening socket: opened by the supervisor, shared by all API processes."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket

from tinkex.errors import ConfigError

BACKLOG = 4096
#: More are not useful, and some programs iterate over every descriptor that is allowed.
MAX_DESCRIPTORS = 1 << 20


def raise_descriptor_limit() -> int:
    """Raise the descriptor limit of this process and its children to the hard limit; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError):  # some systems allow less than the reported hard limit
            return soft
    return limit


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; its backlog holds connections until an API process accepts them."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is not an address of this machine") from error
    family, _, _, _, address = infos[0]
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise _listen_error(error, host, port) from error


def listener_url(listener: socket.socket) -> str:
    """The URL of the socket from this machine."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen_error(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} of {host} is in use",
            hint="Pass another --port; 0 picks a free one.",
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"this user may not use port {port}; pass one above 1023")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"host {host!r} is not an address of this machine")
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}")
