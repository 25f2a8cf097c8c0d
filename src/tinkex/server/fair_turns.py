"""Fair scheduling of an API process between peers.

New connections and new requests start from queues per peer. Each turn of the event loop starts a
few of them, one peer after the other, so a peer with thousands of connections or pipelined requests
delays the others by a few requests instead of by all of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

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
