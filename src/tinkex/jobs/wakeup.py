"""A cheap wake-up between processes: datagrams that say "look", and sometimes where.

Nothing depends on a bell being heard: whoever waits also looks by itself, less often. So a bell may
be lost, rung twice or rung by a stranger without harm.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from tinkex import clock
from tinkex.ids import new_id
from tinkex.store import coordination
from tinkex.store.database import Database
from tinkex.store.records import ProcessRecord

#: How long the addresses of others are believed.
ADDRESS_CACHE_SECONDS: Final = 1.0
#: A process that was not seen for so long is not rung.
ALIVE_SECONDS: Final = 30.0
#: Job ids per datagram: loopback carries far more, other networks about this.
MAX_MESSAGES_PER_DATAGRAM: Final = 24
_MAX_DATAGRAM_BYTES = 4096


class WakeupListener:
    """Something that can be rung; its address is entered in the store."""

    def __init__(self, database: Database, role: str, host: str = "127.0.0.1") -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((host, 0))
        self.socket.setblocking(False)
        address, port = self.socket.getsockname()
        now = clock.now()
        self.process = ProcessRecord(
            id=new_id(), role=role, bell=f"{address}:{port}", started_at=now, seen_at=now
        )
        self._database = database
        self._is_closed = False
        self._lock = threading.Lock()
        database.write(lambda db: coordination.register_process(db, self.process))

    def messages(self) -> list[str]:
        """What was rung since the last look."""
        heard: list[str] = []
        while True:
            try:
                data = self.socket.recv(_MAX_DATAGRAM_BYTES)
            except (BlockingIOError, ConnectionError):
                return heard
            heard += data.decode(errors="replace").split()

    def wait(self, seconds: float) -> list[str]:
        """Wait for a ring, at most so long; returns its words."""
        self.socket.settimeout(max(seconds, 0.001))
        try:
            data = self.socket.recv(_MAX_DATAGRAM_BYTES)
        except (TimeoutError, ConnectionError):
            return []
        finally:
            self.socket.setblocking(False)
        return data.decode(errors="replace").split() + self.messages()

    def wake(self) -> None:
        """End one's own wait."""
        self.socket.sendto(b"look", self.socket.getsockname())

    def heartbeat(self) -> None:
        """Say that this process is alive; on any thread, and nothing once the bell is closed."""
        # Entered again rather than updated: after a long sleep others have forgotten it.
        process = replace(self.process, seen_at=clock.now())
        with self._lock:
            if not self._is_closed:
                self._database.write(lambda db: coordination.register_process(db, process))

    def close(self) -> None:
        """Take the address out of the store."""
        with self._lock:
            self._is_closed = True
            self._database.write(lambda db: coordination.unregister_process(db, self.process.id))
        self.socket.close()


class WakeupSender:
    """Rings all bells of a role."""

    def __init__(self, database: Database, role: str) -> None:
        self._database = database
        self._role = role
        self._addresses: Sequence[tuple[str, int]] = ()
        self._addresses_valid_until = 0.0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def notify(self, messages: Iterable[str] = ("look",)) -> None:
        """Wake everybody of the role; lost datagrams do no harm. Any thread may ring."""
        if not self._socket.fileno() >= 0:
            return
        listed = list(messages)
        for start in range(0, len(listed), MAX_MESSAGES_PER_DATAGRAM):
            data = "\n".join(listed[start : start + MAX_MESSAGES_PER_DATAGRAM]).encode()
            for address in self._current_addresses():
                self._send(data, address)

    def _send(self, data: bytes, address: tuple[str, int]) -> None:
        try:
            self._socket.sendto(data, address)
        except OSError:
            # The process is gone; its successor looks by itself when it starts.
            self._addresses_valid_until = 0.0

    def _current_addresses(self) -> Sequence[tuple[str, int]]:
        now = time.monotonic()
        if now >= self._addresses_valid_until:
            since = clock.now() - ALIVE_SECONDS
            found = self._database.read(
                lambda db: coordination.list_alive_processes(db, self._role, since=since)
            )
            self._addresses = [_parse_address(process.bell) for process in found]
            self._addresses_valid_until = now + ADDRESS_CACHE_SECONDS
        return self._addresses

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()


def _parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
