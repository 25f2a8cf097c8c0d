"""Byte budgets: how much may be under way at once."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from tinkex.client.config import Config
from tinkex.client.retry import RateLimiter
from tinkex.types import ClientConfigResponse


class ByteBudget:
    """Lets work through, first come first served, while it fits.

    Work larger than the whole budget passes alone, when nothing else is under way: the budget is
    never exceeded by more than one such piece. Touched by the I/O loop only.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used_bytes(self) -> int:
        """How much is under way now."""
        return self._used_bytes

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold a share of the budget while the block runs."""
        if self._queue or not self._fits(num_bytes):
            await self._wait_for_room(num_bytes)
        else:
            self._used_bytes += num_bytes
        try:
            yield
        finally:
            self._release(num_bytes)

    def _fits(self, num_bytes: int) -> bool:
        return self._used_bytes == 0 or self._used_bytes + num_bytes <= self.limit_bytes

    async def _wait_for_room(self, num_bytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # Granted and cancelled in the same moment: the share must go back. Cancelled while
            # waiting: who stands behind may fit where this did not.
            is_granted = turn.done() and not turn.cancelled()
            self._release(num_bytes if is_granted else 0)
            raise

    def _release(self, num_bytes: int) -> None:
        self._used_bytes -= num_bytes
        while self._queue:
            wanted, turn = self._queue[0]
            if not turn.cancelled() and not self._fits(wanted):
                return
            self._queue.popleft()
            if not turn.cancelled():
                self._used_bytes += wanted
                turn.set_result(None)


#: After a back-off, submissions start again with this many at a time, for a while.
RECOVERY_SLOTS = 10
RECOVERY_SECONDS = 10.0


class SamplingLimits:
    """Shared by every client of one (server, key); touched by the I/O loop only."""

    def __init__(self) -> None:
        self.limiter = RateLimiter()
        self.budget = ByteBudget(ClientConfigResponse().sample_dispatch_bytes_semaphore_size)
        self._recovery_slots = asyncio.Semaphore(RECOVERY_SLOTS)

    def apply_server_config(self, server_config: ClientConfigResponse) -> None:
        """Take over the server's limits."""
        self.budget.limit_bytes = server_config.sample_dispatch_bytes_semaphore_size

    @asynccontextmanager
    async def acquire(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for the end of a back-off and for room, and hold it while submitting."""
        async with self._recovery_slot(), self.budget.reserve(num_bytes):
            while (wait := self.limiter.remaining_seconds()) > 0.0:
                await asyncio.sleep(wait)
            yield

    @asynccontextmanager
    async def _recovery_slot(self) -> AsyncIterator[None]:
        if not self.limiter.is_recovering(RECOVERY_SECONDS):
            yield
            return
        async with self._recovery_slots:
            yield


_SHARED_LIMITS: WeakValueDictionary[tuple[str, str], SamplingLimits] = WeakValueDictionary()
# A weak dictionary's setdefault is several steps; two threads must not make two lanes.
_SHARED_LIMITS_LOCK = threading.Lock()


def get_sampling_limits(config: Config, credential: str | None) -> SamplingLimits:
    """The lane of this server and key; the key itself is not kept."""
    digest = hashlib.sha256((credential or "").encode()).hexdigest()
    with _SHARED_LIMITS_LOCK:
        return _SHARED_LIMITS.setdefault((config.base_url, digest), SamplingLimits())
