"""Accept connections fairly, so that one peer cannot delay all others.

asyncio accepts all waiting connections and serves them in order of arrival: behind a peer that
connects faster than it is served, every other peer waits for the whole backlog.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from functools import partial

from tinkex.logs import get_logger
from tinkex.server.http.connections import ConnectionRegistry, count_closed

LOG = get_logger(__name__)
#: Connections accepted from the kernel's queue in one iteration of the event loop.
MAX_ACCEPTS_PER_ITERATION = 64
#: Accepted connections that may wait for their start, in total and per peer.
MAX_WAITING = 2048
MAX_WAITING_PER_PEER = 1024
#: How long to wait for descriptors or memory to become free.
RETRY_SECONDS = 0.25
_RESOURCE_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


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
