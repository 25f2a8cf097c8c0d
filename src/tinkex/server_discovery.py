"""Find the running server of a home: its state file, its lock, its health endpoint."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from tinkex.home import Home
from tinkex.system.locks import is_locked
from tinkex.system.processes import is_alive, read_start_time

HEALTH_PATH = "/api/v1/healthz"
READY_PATH = "/readyz"
_MAX_STATUS_BYTES = 4096


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a running server writes to its home."""

    pid: int
    """The supervisor's process id."""
    url: str
    """Its URL on this machine."""
    version: str
    """Its tinkex version."""
    started_at: float
    """When it became ready, in seconds since 1970."""
    log: str | None = None
    """Its log file; None means the terminal that it was started in."""
    worker_wakeup: str | None = None
    """The UDP address that starts an on-demand worker; None once the worker runs."""


def read_state(home: Home) -> ServerState | None:
    """Return the state of the last server, which may have ended; None if it is unreadable."""
    try:
        return msgspec.json.decode(home.state_file.read_bytes(), type=ServerState)
    except (OSError, msgspec.DecodeError):
        return None


def find_server(home: Home, timeout_seconds: float = 2.0) -> ServerState | None:
    """Return the running, responding server of a home, if any."""
    state = read_state(home)
    if state is None or not is_alive(state.pid):
        return None
    return state if get_http_status(state.url + HEALTH_PATH, timeout_seconds) == 200 else None


def find_lock_holder(home: Home) -> LockHolder | None:
    """Return the supervisor that holds the home's lock, also while it starts or stops.

    After a kill of the supervisor, its child processes hold the lock until they exit.
    """
    if not is_locked(home.server_lock):
        return None
    return LockHolder.parse(home.server_lock.read_bytes())


class LockHolder(NamedTuple):
    """The supervisor named in a lock file; only valid while the file is locked."""

    pid: int
    start_time: str
    """Start time of the process in clock ticks; empty if unknown."""

    @classmethod
    def current(cls) -> LockHolder:
        """Return the holder for this process."""
        return cls(os.getpid(), read_start_time(os.getpid()))

    @classmethod
    def parse(cls, content: bytes) -> LockHolder | None:
        """Parse the content of a lock file."""
        pid, _, started = content.decode("ascii", errors="replace").partition(" ")
        return cls(int(pid), started.strip()) if pid.isdecimal() else None

    def encode(self) -> bytes:
        """Return the content of a lock file."""
        return f"{self.pid} {self.start_time}".encode()

    @property
    def is_alive(self) -> bool:
        """Whether that process runs; another process with a reused pid does not count."""
        if not is_alive(self.pid):
            return False
        return not self.start_time or read_start_time(self.pid) in {"", self.start_time}


def get_http_status(url: str, timeout_seconds: float) -> int | None:
    """Return the status of a GET request; None without a response in time.

    Uses a plain socket, because every command would have to load an HTTP library.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    request = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection((host, port), timeout_seconds) as connection:
            connection.sendall(request.encode())
            words = _read_status_line(connection).split()
    except OSError:
        return None
    is_http = len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit()
    return int(words[1]) if is_http else None


def _read_status_line(connection: socket.socket) -> bytes:
    head = b""
    while b"\n" not in head and len(head) < _MAX_STATUS_BYTES:
        part = connection.recv(_MAX_STATUS_BYTES)
        if not part:
            break
        head += part
    return head.partition(b"\n")[0]
