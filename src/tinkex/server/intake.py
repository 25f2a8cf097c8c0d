"""The memory that request bodies take: a budget of bytes in flight, and a pool that decodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from tinkex.errors import InternalServerError, RateLimitError
from tinkex.server.config import ServerConfig

T = TypeVar("T")
#: When a client that was refused because memory is short should send its request again.
OVERLOAD_RETRY_SECONDS = 2.0
#: Decoding holds the interpreter's lock for most of its time, so more threads gain nothing.
NUM_DECODER_THREADS = 2


class Overloaded(InternalServerError):
    """HTTP 503: the server holds as many request bytes as it may."""

    status_code = 503


class BodyMemoryBudget:
    """What one API process holds of request bodies, of all tenants together."""

    def __init__(self, config: ServerConfig) -> None:
        self.max_body_bytes = config.max_body_bytes
        self.body_seconds = config.body_seconds
        self.max_bytes = max(config.max_inflight_bytes, config.max_body_bytes)
        """A budget smaller than one body would refuse that body for ever."""
        self.max_bytes_per_tenant = max(self.max_bytes // 2, config.max_body_bytes)
        self.num_bytes = 0
        self._by_tenant: Counter[str] = Counter()
        self._decoders = ThreadPoolExecutor(NUM_DECODER_THREADS, thread_name_prefix="decoder")

    def reserve(self, tenant_id: str) -> BodyReservation:
        """A share of the budget that is given back when the block ends."""
        return BodyReservation(self, tenant_id)

    def acquire(self, tenant_id: str, num_bytes: int) -> None:
        """Count bytes of a tenant; RateLimitError or Overloaded if they are too many."""
        if self._by_tenant[tenant_id] + num_bytes > self.max_bytes_per_tenant:
            raise RateLimitError(
                f"your requests in flight have more than {self.max_bytes_per_tenant} bytes; "
                "send fewer at once",
                retry_after_seconds=OVERLOAD_RETRY_SECONDS,
            )
        if self.num_bytes + num_bytes > self.max_bytes:
            raise Overloaded(
                f"the requests in flight have more than {self.max_bytes} bytes; try again",
                retry_after_seconds=OVERLOAD_RETRY_SECONDS,
            )
        self.num_bytes += num_bytes
        self._by_tenant[tenant_id] += num_bytes

    def release(self, tenant_id: str, num_bytes: int) -> None:
        """Count bytes of a tenant as gone."""
        self.num_bytes -= num_bytes
        self._by_tenant[tenant_id] -= num_bytes
        if not self._by_tenant[tenant_id]:
            del self._by_tenant[tenant_id]

    async def run_decoder(self, function: Callable[[], T]) -> T:
        """Run what decodes a large body on one of few threads."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, function)


class BodyReservation:
    """The bytes that one request holds."""

    __slots__ = ("_intake", "_num_bytes", "_tenant_id")

    def __init__(self, body_budget: BodyMemoryBudget, tenant_id: str) -> None:
        self._intake = body_budget
        self._tenant_id = tenant_id
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._num_bytes:
            self._intake.release(self._tenant_id, self._num_bytes)
            self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Hold more; raises if the budget does not allow it."""
        self._intake.acquire(self._tenant_id, num_bytes)
        self._num_bytes += num_bytes
