"""Wake-up notifications between processes: over loopback UDP, and through PostgreSQL to others.

Waiting processes also poll, less often, so a lost, repeated or forged message does no harm.
"""

from __future__ import annotations

import contextlib
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
from tinkex.store.notifications import NotificationListener, NotificationSender
from tinkex.store.records import ProcessRecord
from tinkex.store.write_locks import SHARED
from tinkex.system.addresses import network_id

#: How long the addresses of other processes are cached.
ADDRESS_CACHE_SECONDS: Final = 1.0
#: Processes without a heartbeat for longer than this are not notified.
ALIVE_SECONDS: Final = 30.0
#: Job ids per datagram; more could exceed the packet size of a network.
MAX_MESSAGES_PER_DATAGRAM: Final = 24
_MAX_DATAGRAM_BYTES = 4096


class WakeupListener:
    """A UDP socket whose address is registered in the store."""

    def __init__(
        self, database: Database, role: str, host: str = "127.0.0.1", *, stream_address: str = ""
    ) -> None:
        """`stream_address` is where API processes read the tokens of a worker's samples."""
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((host, 0))
        self.socket.setblocking(False)
        address, port = self.socket.getsockname()
        now = clock.now()
        self.process = ProcessRecord(
            id=new_id(),
            role=role,
            bell=f"{address}:{port}",
            started_at=now,
            seen_at=now,
            network=network_id(),
            stream_address=stream_address,
        )
        self._database = database
        self._is_closed = False
        self._lock = threading.Lock()
        database.write(lambda db: coordination.register_process(db, self.process), SHARED)
        self._remote: NotificationListener | None = None
        if not database.is_sqlite:
            self._remote = NotificationListener(database.engine, role, self._forward)

    def _forward(self, text: str) -> None:
        """Send a message from another machine to this process's own socket."""
        words = text.split()
        for start in range(0, len(words), MAX_MESSAGES_PER_DATAGRAM):
            data = "\n".join(words[start : start + MAX_MESSAGES_PER_DATAGRAM]).encode()
            with contextlib.suppress(OSError):
                self.socket.sendto(data, self.socket.getsockname())

    def messages(self) -> list[str]:
        """Return the messages that have arrived, without waiting."""
        received: list[str] = []
        while True:
            try:
                data = self.socket.recv(_MAX_DATAGRAM_BYTES)
            except (BlockingIOError, ConnectionError):
                return received
            received += data.decode(errors="replace").split()

    def wait(self, seconds: float) -> list[str]:
        """Wait for messages, at most this long, and return them."""
        self.socket.settimeout(max(seconds, 0.001))
        try:
            data = self.socket.recv(_MAX_DATAGRAM_BYTES)
        except (TimeoutError, ConnectionError):
            return []
        finally:
            self.socket.setblocking(False)
        return data.decode(errors="replace").split() + self.messages()

    def wake(self) -> None:
        """End this process's own `wait`."""
        with contextlib.suppress(OSError):  # it may be closed already
            self.socket.sendto(b"look", self.socket.getsockname())

    def heartbeat(self) -> None:
        """Renew the registration of this process; thread-safe, no effect after `close`."""
        # Inserted again, not updated: after a long sleep the row may have been deleted.
        process = replace(self.process, seen_at=clock.now())
        with self._lock:
            if not self._is_closed:
                self._database.write(lambda db: coordination.register_process(db, process), SHARED)

    def close(self) -> None:
        """Unregister the address and close the socket."""
        with self._lock:
            self._is_closed = True
            self._database.write(
                lambda db: coordination.unregister_process(db, self.process.id), SHARED
            )
        if self._remote is not None:
            self._remote.close()
        self.socket.close()


class WakeupSender:
    """Notifies all processes of a role."""

    def __init__(self, database: Database, role: str) -> None:
        self._database = database
        self._role = role
        self._addresses: Sequence[tuple[str, int]] = ()
        self._addresses_valid_until = 0.0
        self._has_remote = False
        self._network = network_id()
        self._remote = NotificationSender(database.engine, role)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def notify(self, messages: Iterable[str] = ("look",)) -> None:
        """Wake all processes of the role; thread-safe."""
        if not self._socket.fileno() >= 0:
            return
        texts = list(messages)
        addresses = self._current_addresses()
        if self._has_remote and texts:
            self._remote.send(texts)
        for start in range(0, len(texts), MAX_MESSAGES_PER_DATAGRAM):
            data = "\n".join(texts[start : start + MAX_MESSAGES_PER_DATAGRAM]).encode()
            for address in addresses:
                self._send(data, address)

    def _send(self, data: bytes, address: tuple[str, int]) -> None:
        try:
            self._socket.sendto(data, address)
        except OSError:
            # The process has ended; its successor polls when it starts.
            self._addresses_valid_until = 0.0

    def _current_addresses(self) -> Sequence[tuple[str, int]]:
        now = time.monotonic()
        if now >= self._addresses_valid_until:
            since = clock.now() - ALIVE_SECONDS
            alive = self._database.read(
                lambda db: coordination.list_alive_processes(db, self._role, since=since)
            )
            local = [process for process in alive if process.network in {"", self._network}]
            self._addresses = [_parse_address(process.bell) for process in local]
            self._has_remote = len(local) < len(alive)
            self._addresses_valid_until = now + ADDRESS_CACHE_SECONDS
        return self._addresses

    def close(self) -> None:
        """Close the socket and the connection."""
        self._remote.close()
        self._socket.close()


def _parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
