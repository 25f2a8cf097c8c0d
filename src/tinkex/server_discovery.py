"""Whether a server runs in a home: what it wrote about itself, and whether it answers."""

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
    """What a running server says about itself in its home."""

    pid: int
    """The supervisor's process id."""
    url: str
    """Where this machine reaches it."""
    version: str
    """The version of tinkex that serves."""
    started_at: float
    """When it was ready, in seconds since 1970."""
    log: str | None = None
    """The file that its log goes to; None is the terminal that it was started in."""
    worker_wakeup: str | None = None
    """The address whose datagrams start a worker that waits for work; None once the worker runs."""


def read_state(home: Home) -> ServerState | None:
    """What the last server wrote; it may be dead by now. None if there is nothing readable."""
    try:
        return msgspec.json.decode(home.state_file.read_bytes(), type=ServerState)
    except (OSError, msgspec.DecodeError):
        return None


def find_server(home: Home, timeout_seconds: float = 2.0) -> ServerState | None:
    """The server that runs in a home and answers, if there is one."""
    state = read_state(home)
    if state is None or not is_alive(state.pid):
        return None
    return state if get_http_status(state.url + HEALTH_PATH, timeout_seconds) == 200 else None


def find_lock_holder(home: Home) -> LockHolder | None:
    """The supervisor that has the home, also while it starts or stops; None if nobody has it.

    A supervisor that was killed has its home until its processes noticed.
    """
    if not is_locked(home.server_lock):
        return None
    return LockHolder.parse(home.server_lock.read_bytes())


class LockHolder(NamedTuple):
    """The supervisor that a lock file names; it means nothing unless the file is locked."""

    pid: int
    start_time: str
    """When the process began, as the system counts; empty where it does not say."""

    @classmethod
    def current(cls) -> LockHolder:
        """This process."""
        return cls(os.getpid(), read_start_time(os.getpid()))

    @classmethod
    def parse(cls, content: bytes) -> LockHolder | None:
        """What a lock file says."""
        pid, _, started = content.decode("ascii", errors="replace").partition(" ")
        return cls(int(pid), started.strip()) if pid.isdecimal() else None

    def encode(self) -> bytes:
        """What a lock file should say."""
        return f"{self.pid} {self.start_time}".encode()

    @property
    def is_alive(self) -> bool:
        """Whether that process exists; one that has its pid by chance is another one."""
        if not is_alive(self.pid):
            return False
        return not self.start_time or read_start_time(self.pid) in {"", self.start_time}


def get_http_status(url: str, timeout_seconds: float) -> int | None:
    """The status that a GET answers with; None if no answer comes in time.

    A socket is enough for this, and an HTTP library would be loaded by every command.
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
    is_answer = len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit()
    return int(words[1]) if is_answer else None


def _read_status_line(connection: socket.socket) -> bytes:
    head = b""
    while b"\n" not in head and len(head) < _MAX_STATUS_BYTES:
        part = connection.recv(_MAX_STATUS_BYTES)
        if not part:
            break
        head += part
    return head.partition(b"\n")[0]
