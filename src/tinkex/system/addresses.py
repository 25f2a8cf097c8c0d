"""Network addresses of this machine."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path


def is_loopback(host: str) -> bool:
    """Whether the address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_ip_address(host: str) -> bool:
    """Whether the host is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def network_id() -> str:
    """Return an id of the network namespace: processes with the same one share loopback."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot_id}:{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


def find_own_address(other_host: str) -> str:
    """Return the IP address with which this machine reaches another; raises OSError."""
    # A datagram socket sends nothing when it connects, but chooses its address.
    family, kind, protocol, _, address = socket.getaddrinfo(other_host, 9, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
