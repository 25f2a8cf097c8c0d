"""Limits shared by concurrent requests: byte budgets and back-off after a 429."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from tinkex.client.config import Config
from tinkex.types import ClientConfigResponse

#: Prompts estimated above this many bytes back off longer.
LARGE_PROMPT_BYTES = 128 * 1024
SMALL_BACKOFF_SECONDS = 1.0
LARGE_BACKOFF_SECONDS = 5.0


class RateLimiter:
    """Holds submissions back after a 429. Used on the I/O loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0
        self._started_at = 0.0

    def now(self) -> float:
        """Return the time of the limiter's clock."""
        return self._clock()

    def remaining_seconds(self) -> float:
        """Return the seconds to wait before submitting; 0.0 without a back-off."""
        return max(0.0, self._until - self._clock())

    def is_backing_off(self) -> bool:
        """True during a back-off."""
        return self.remaining_seconds() > 0.0

    def back_off(self, seconds: float) -> None:
        """Hold submissions back for at least this long; never shortens a back-off."""
        now = self._clock()
        self._started_at = now
        self._until = max(self._until, now + seconds)

    def is_recovering(self, seconds: float) -> bool:
        """True during a back-off and for some seconds after it."""
        return self._until > 0.0 and self._clock() < self._until + seconds

    def end_backoff(self, started_at: float) -> None:
        """End the back-off after a success, unless that request started before the back-off."""
        if started_at > self._started_at:
            # Recovery continues: one success must not release all waiting submissions.
            self._until = min(self._until, self._clock())


def rate_limit_backoff(prompt_bytes: int, retry_after_seconds: float | None) -> float:
    """Return the back-off after a 429: the server's retry-after or the default, if longer."""
    is_large = prompt_bytes > LARGE_PROMPT_BYTES
    return max(
        LARGE_BACKOFF_SECONDS if is_large else SMALL_BACKOFF_SECONDS, retry_after_seconds or 0.0
    )


class ByteBudget:
    """A semaphore over bytes, first come first served.

    A request larger than the whole budget runs alone, so at most one such request exceeds the
    budget. Used on the I/O loop only.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used_bytes(self) -> int:
        """The number of bytes reserved now."""
        return self._used_bytes

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncIterator[None]:
        """Reserve bytes while the block runs."""
        if self._queue or not self._fits(num_bytes):
            await self._wait_until_granted(num_bytes)
        else:
            self._used_bytes += num_bytes
        try:
            yield
        finally:
            self._release(num_bytes)

    def _fits(self, num_bytes: int) -> bool:
        return self._used_bytes == 0 or self._used_bytes + num_bytes <= self.limit_bytes

    async def _wait_until_granted(self, num_bytes: int) -> None:
        grant: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((num_bytes, grant))
        try:
            await grant
        except asyncio.CancelledError:
            # Granted and cancelled at the same time: release the bytes. Cancelled while waiting:
            # the next request in the queue may fit where this one did not.
            is_granted = grant.done() and not grant.cancelled()
            self._release(num_bytes if is_granted else 0)
            raise

    def _release(self, num_bytes: int) -> None:
        self._used_bytes -= num_bytes
        while self._queue:
            requested, grant = self._queue[0]
            if not grant.cancelled() and not self._fits(requested):
                return
            self._queue.popleft()
            if not grant.cancelled():
                self._used_bytes += requested
                grant.set_result(None)


#: For RECOVERY_SECONDS after a back-off, at most this many submissions run concurrently.
RECOVERY_SLOTS = 10
RECOVERY_SECONDS = 10.0


class SamplingLimits:
    """Limits shared by all clients of one (server, key). Used on the I/O loop only."""

    def __init__(self) -> None:
        self.limiter = RateLimiter()
        self.budget = ByteBudget(ClientConfigResponse().sample_dispatch_bytes_semaphore_size)
        self._recovery_slots = asyncio.Semaphore(RECOVERY_SLOTS)

    def apply_server_config(self, server_config: ClientConfigResponse) -> None:
        """Apply the server's limits."""
        self.budget.limit_bytes = server_config.sample_dispatch_bytes_semaphore_size

    @asynccontextmanager
    async def acquire(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for the end of a back-off, and reserve bytes while the block submits."""
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
# WeakValueDictionary.setdefault is not atomic; two threads must not create two objects.
_SHARED_LIMITS_LOCK = threading.Lock()


def get_sampling_limits(config: Config, credential: str | None) -> SamplingLimits:
    """Return the limits of this server and key; stores only a digest of the key."""
    digest = hashlib.sha256((credential or "").encode()).hexdigest()
    with _SHARED_LIMITS_LOCK:
        return _SHARED_LIMITS.setdefault((config.base_url, digest), SamplingLimits())
