"""The open connections of an API process: how many there may be, and which are closed first.

A connection is half-sent while the head of a request arrives, busy while one is answered, and idle
between two. Only requests that are being answered are safe: whenever there are too many
connections, half-sent ones are closed first, then idle ones, the oldest of each before the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from tinkex.server.config import ServerConfig
from tinkex.server.fair_turns import FairStartQueue
from tinkex.server.metrics import CONNECTIONS, CONNECTIONS_CLOSED

#: How often connections are looked over for those that have run out of time.
SWEEP_SECONDS = 1.0
#: Descriptors that are kept for the database, files and pipes.
RESERVED_DESCRIPTORS = 256
#: More connections than this take more memory than they are worth, however many are allowed.
MAX_CONNECTIONS = 16_384
MIN_CONNECTIONS = 16


class ConnectionPhase(Enum):
    """What a connection is doing."""

    HEAD = auto()  #: the head of a request is arriving
    BUSY = auto()  #: a request is being answered
    DRAIN = auto()  #: the answer is sent, and the rest of the request is thrown away
    IDLE = auto()  #: nothing was sent since the last answer


class ManagedConnection(Protocol):
    """A connection as the registry sees it."""

    phase: ConnectionPhase
    peer: str

    def drop(self, reason: str) -> None:
        """Close it now."""

    def expire(self, now: float) -> None:
        """Close it if it has run out of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How many connections there may be, and how long they may take."""

    max_connections: int
    max_per_peer: int
    head_seconds: float
    body_seconds: float

    @classmethod
    def from_config(cls, config: ServerConfig, num_descriptors: int) -> ConnectionLimits:
        """The settings; what they leave open follows from the number of descriptors."""
        allowed = max(MIN_CONNECTIONS, num_descriptors - RESERVED_DESCRIPTORS)
        most = min(config.max_connections or MAX_CONNECTIONS, allowed)
        return cls(
            max_connections=most,
            max_per_peer=min(config.max_connections_per_peer or max(1, most // 2), most),
            head_seconds=config.head_seconds,
            body_seconds=config.body_seconds,
        )


class ConnectionRegistry:
    """The open connections of one process."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.start_queue = FairStartQueue()
        """In which order connections and requests start."""
        self._all: dict[ManagedConnection, None] = {}
        self._incomplete: dict[ManagedConnection, None] = {}
        self._idle: dict[ManagedConnection, None] = {}
        self._by_peer: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: ManagedConnection) -> bool:
        """Enter a new connection; False if there are too many and all others are busy."""
        self._add(connection)
        if self._by_peer[connection.peer] > self.limits.max_per_peer:
            return self._evict_one(connection, same_peer=True)
        if len(self._all) > self.limits.max_connections:
            return self._evict_one(connection, same_peer=False)
        return True

    def _add(self, connection: ManagedConnection) -> None:
        self._all[connection] = None
        self._incomplete[connection] = None
        self._by_peer[connection.peer] += 1
        CONNECTIONS.set(len(self._all))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _evict_one(self, newcomer: ManagedConnection, *, same_peer: bool) -> bool:
        for other in self._evictable():
            if other is not newcomer and (not same_peer or other.peer == newcomer.peer):
                self.remove(other)
                other.drop("limit")
                return True
        return False

    def _evictable(self) -> Iterator[ManagedConnection]:
        yield from self._incomplete
        yield from self._idle

    def remove(self, connection: ManagedConnection) -> None:
        """Forget a connection that is closed or about to be."""
        if connection not in self._all:
            return
        del self._all[connection]
        self._incomplete.pop(connection, None)
        self._idle.pop(connection, None)
        self._by_peer[connection.peer] -= 1
        if not self._by_peer[connection.peer]:
            del self._by_peer[connection.peer]
        CONNECTIONS.set(len(self._all))

    def set_phase(self, connection: ManagedConnection, phase: ConnectionPhase) -> None:
        """Note what a connection does from now on."""
        connection.phase = phase
        self._incomplete.pop(connection, None)
        self._idle.pop(connection, None)
        if connection not in self._all:
            return
        if phase is ConnectionPhase.IDLE:
            self._idle[connection] = None
        elif phase is not ConnectionPhase.BUSY:
            self._incomplete[connection] = None

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in list(self._all):
            connection.expire(loop.time())
        self._timer = loop.call_later(SWEEP_SECONDS, self._sweep) if self._all else None


def count_closed(reason: str) -> None:
    """Note that a connection was closed by the server before its time."""
    CONNECTIONS_CLOSED.labels(reason).inc()
