"""Accepts connections, starts them and their requests fairly between peers, and limits them.

asyncio accepts all waiting connections and serves them in order of arrival: behind a peer that
connects faster than it is served, every other peer waits for the whole backlog. Here new
connections and requests start from one queue per peer. Each iteration of the event loop starts a
few of them, round robin, so a peer with thousands of connections or pipelined requests delays
others by a few requests only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Protocol

from tinkex.logs import get_logger
from tinkex.server.config import ServerConfig
from tinkex.server.http.prometheus import CONNECTIONS, CONNECTIONS_CLOSED

LOG = get_logger(__name__)
StartCallback = Callable[[], None]

#: Starts per event loop iteration; each takes less than a millisecond.
STARTS_PER_ITERATION = 2
#: A peer with more starts than this waiting has its newest served first. It is sending faster than
#: it can be served, and its oldest starts would time out at the clients anyway; a new client at the
#: same address does not have to wait behind them.
MAX_FIFO_STARTS = 64

#: How often connections are checked for timeouts.
SWEEP_SECONDS = 1.0
#: Descriptors reserved for the database, files and pipes.
RESERVED_DESCRIPTORS = 256
#: More connections than this would take too much memory.
MAX_CONNECTIONS = 16_384
MIN_CONNECTIONS = 16

#: Connections accepted from the kernel's queue in one iteration of the event loop.
MAX_ACCEPTS_PER_ITERATION = 64
#: Accepted connections that may wait for their start, in total and per peer.
MAX_WAITING = 2048
MAX_WAITING_PER_PEER = 1024
#: How long to wait for descriptors or memory to become free.
RETRY_SECONDS = 0.25
_RESOURCE_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class FairStartQueue:
    """Calls start callbacks of several peers, round robin."""

    def __init__(self, starts_per_iteration: int = STARTS_PER_ITERATION) -> None:
        self._starts_per_iteration = starts_per_iteration
        self._num_left = starts_per_iteration
        self._num_waiting = 0
        self._queues: dict[str, deque[StartCallback]] = {}
        self._is_scheduled = False

    def __len__(self) -> int:
        return self._num_waiting

    def num_waiting(self, peer: str) -> int:
        """Number of waiting starts of a peer."""
        return len(self._queues.get(peer, ()))

    def submit(self, peer: str, start: StartCallback) -> None:
        """Call `start` now if this iteration allows it, otherwise in the peer's turn."""
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
        """Take the next peer's start and move the peer to the end of the round."""
        peer = next(iter(self._queues))
        queue = self._queues.pop(peer)
        start = queue.popleft() if len(queue) <= MAX_FIFO_STARTS else queue.pop()
        self._num_waiting -= 1
        if queue:
            self._queues[peer] = queue
        return start


class ConnectionPhase(Enum):
    """The phase of a connection."""

    HEAD = auto()  #: the head of a request is arriving
    BUSY = auto()  #: a request is being handled
    DRAIN = auto()  #: the response is sent, and the rest of the request is discarded
    IDLE = auto()  #: nothing was received since the last response


class ManagedConnection(Protocol):
    """A connection as the registry sees it."""

    phase: ConnectionPhase
    peer: str

    def drop(self, reason: str) -> None:
        """Close it now."""

    def expire(self, now: float) -> None:
        """Close it if a timeout has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits on the number of connections, and their timeouts."""

    max_connections: int
    max_per_peer: int
    head_seconds: float
    body_seconds: float

    @classmethod
    def from_config(cls, config: ServerConfig, num_descriptors: int) -> ConnectionLimits:
        """Limits from the settings, within the number of descriptors."""
        allowed = max(MIN_CONNECTIONS, num_descriptors - RESERVED_DESCRIPTORS)
        maximum = min(config.max_connections or MAX_CONNECTIONS, allowed)
        return cls(
            max_connections=maximum,
            max_per_peer=min(config.max_connections_per_peer or max(1, maximum // 2), maximum),
            head_seconds=config.head_seconds,
            body_seconds=config.body_seconds,
        )


class ConnectionRegistry:
    """The open connections of one process."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.start_queue = FairStartQueue()
        """Orders the start of connections and requests."""
        self._all: dict[ManagedConnection, None] = {}
        self._incomplete: dict[ManagedConnection, None] = {}
        self._idle: dict[ManagedConnection, None] = {}
        self._by_peer: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: ManagedConnection) -> bool:
        """Add a connection; False if there are too many and no other one can be evicted."""
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
        """Remove a connection that is closed or about to be."""
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
        """Set the phase of a connection."""
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
    """Count a connection that the server closed early."""
    CONNECTIONS_CLOSED.labels(reason).inc()


class Acceptor:
    """Accepts on a listening socket and starts connections fairly; a server for uvicorn."""

    def __init__(
        self,
        listener: socket.socket,
        connections: ConnectionRegistry,
        make_protocol: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        self._listener = listener
        self._start_queue = connections.start_queue
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[object]] = set()
        self._is_open = True
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting; connections that have not started are closed."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Wait for the connections that are starting."""
        if self._starting:
            await asyncio.wait(self._starting)

    def _resume(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS_PER_ITERATION):
            if len(self._start_queue) >= MAX_WAITING:
                return
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._enqueue(connection, str(address[0]))

    def _pause(self, error: OSError) -> None:
        """Retry later if the system is out of resources; connections wait in the kernel."""
        if error.errno not in _RESOURCE_ERRNOS:
            raise error
        LOG.warning("cannot accept connections: %s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._loop.call_later(RETRY_SECONDS, self._resume)

    def _enqueue(self, connection: socket.socket, address: str) -> None:
        # A separate queue: requests on open connections must not wait behind new connections.
        peer = f"new {address}"
        if self._start_queue.num_waiting(peer) >= MAX_WAITING_PER_PEER:
            count_closed("limit")
            connection.close()
            return
        connection.setblocking(False)
        self._start_queue.submit(peer, partial(self._start, connection))

    def _start(self, connection: socket.socket) -> None:
        if not self._is_open:
            connection.close()
            return
        starting = self._loop.connect_accepted_socket(self._make_protocol, connection)
        task = self._loop.create_task(starting)
        self._starting.add(task)
        task.add_done_callback(self._on_started)

    def _on_started(self, task: asyncio.Task[object]) -> None:
        self._starting.discard(task)
        # The client may have disconnected in the meantime.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            task.result()
