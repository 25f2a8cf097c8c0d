"""Fair share between tenants, and the adaptive size of a batch of operations.

Start-time fair queueing: each tenant has a virtual time, which is the number of tokens it was
served. A tenant that had no work joins at the virtual time of the tenant being served, so it
neither catches up on the past nor waits behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
#: Target duration of one batch of operations.
TARGET_BATCH_SECONDS = 0.005
MAX_OPERATIONS = 32
#: Weight of the newest duration in the running mean.
_EMA_WEIGHT = 0.2
#: Beyond this number, tenants that are not ahead of the virtual clock are dropped.
MAX_TENANTS = 1024


class FairShare:
    """The virtual time of every tenant; all tenants have the same weight."""

    def __init__(self) -> None:
        self._virtual_times: dict[str, float] = {}
        self._virtual_clock = 0.0
        """The virtual time of the tenant that was picked last."""

    def __len__(self) -> int:
        return len(self._virtual_times)

    def join(self, tenant_id: str) -> None:
        """Add a tenant that has work again."""
        self._virtual_times[tenant_id] = max(
            self._virtual_times.get(tenant_id, 0.0), self._virtual_clock
        )

    def leave(self, tenant_id: str) -> None:
        """Remove a tenant without work, unless it is ahead of the others."""
        if self._virtual_times.get(tenant_id, 0.0) <= self._virtual_clock:
            self._virtual_times.pop(tenant_id, None)
        if len(self._virtual_times) > MAX_TENANTS:
            self._virtual_times = {
                name: time
                for name, time in self._virtual_times.items()
                if time > self._virtual_clock
            }

    def pick(self, tenant_id: str, num_tokens: float) -> None:
        """Serve a tenant and charge it for the tokens."""
        self._virtual_clock = max(self._virtual_clock, self._virtual_times.get(tenant_id, 0.0))
        self.charge(tenant_id, num_tokens)

    def charge(self, tenant_id: str, num_tokens: float) -> None:
        """Charge a tenant for tokens; negative numbers are refunds."""
        self._virtual_times[tenant_id] = (
            self._virtual_times.get(tenant_id, self._virtual_clock) + num_tokens
        )

    def sort_least_served(self, tenant_ids: Iterable[str]) -> list[str]:
        """Sort tenants by tokens served, least first; the sort is stable."""
        return sorted(
            tenant_ids, key=lambda each: self._virtual_times.get(each, self._virtual_clock)
        )


class AdaptiveBatchSize:
    """Chooses the batch size from a running mean of operation durations."""

    def __init__(self) -> None:
        self._mean_seconds = TARGET_BATCH_SECONDS

    @property
    def max_operations(self) -> int:
        """The number of operations allowed in the next batch."""
        return max(
            1, min(MAX_OPERATIONS, int(TARGET_BATCH_SECONDS / max(self._mean_seconds, 1e-6)))
        )

    def record(self, seconds: float) -> None:
        """Record the duration of an operation; a slow one counts fully."""
        mean = self._mean_seconds + _EMA_WEIGHT * (seconds - self._mean_seconds)
        self._mean_seconds = max(mean, seconds) if seconds > TARGET_BATCH_SECONDS else mean

    def run_timed(self, operation: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run an operation and record its duration."""
        started = time.perf_counter()
        try:
            return operation(*args, **options)
        finally:
            self.record(time.perf_counter() - started)
