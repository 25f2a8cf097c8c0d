"""The way samples take to one server with one key: back-off and byte budget, shared."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from tinkex.client.budget import ByteBudget
from tinkex.client.config import Config
from tinkex.client.limiter import RateLimiter
from tinkex.types import ClientConfigResponse

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
