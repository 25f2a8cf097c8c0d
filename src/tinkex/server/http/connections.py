"""Fair scheduling of an API process between peers.

New connections and new requests start from queues per peer. Each turn of the event loop starts a
few of them, one peer after the other, so a peer with thousands of connections or pipelined requests
delays the others by a few requests instead of by all of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from tinkex.server.config import ServerConfig
from tinkex.server.http.prometheus import CONNECTIONS, CONNECTIONS_CLOSED

#: Connections and requests that start in one turn of the loop; each costs less than a millisecond.
STARTS_PER_ITERATION = 2

#: A peer with more starts than this waiting has its newest served first. It is sending faster than
#: it can be served, and its oldest starts would time out at the clients anyway; a new client at the
#: same address does not have to wait behind them.
MAX_FIFO_STARTS = 64

StartCallback = Callable[[], None]


class FairStartQueue:
    """Starts work of several peers, round robin."""

    def __init__(self, starts_per_iteration: int = STARTS_PER_ITERATION) -> None:
        self._starts_per_iteration = starts_per_iteration
        self._num_left = starts_per_iteration
        self._num_waiting = 0
        self._queues: dict[str, deque[StartCallback]] = {}
        self._is_scheduled = False

    def __len__(self) -> int:
        return self._num_waiting

    def num_waiting(self, peer: str) -> int:
        """How many starts of a peer wait."""
        return len(self._queues.get(peer, ()))

    def submit(self, peer: str, start: StartCallback) -> None:
        """Call `start` now if this turn still has room, else when the peer's turn comes."""
        self._schedule()
        if self._num_left and not self._queues:
            self._num_left -= 1
            start()
            return
        self._queues.setdefault(peer, deque()).append(start)
        self._num_waiting += 1

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_iteration)

    def _run_iteration(self) -> None:
        self._is_scheduled = False
        self._num_left = self._starts_per_iteration
        while self._queues and self._num_left:
            self._num_left -= 1
            self._pop()()
        if self._num_left < self._starts_per_iteration:
            self._schedule()

    def _pop(self) -> StartCallback:
        """The oldest start of the next peer, which then moves to the end of the round."""
        peer = next(iter(self._queues))
        queue = self._queues.pop(peer)
        start = queue.popleft() if len(queue) <= MAX_FIFO_STARTS else queue.pop()
        self._num_waiting -= 1
        if queue:
            self._queues[peer] = queue
        return start


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
