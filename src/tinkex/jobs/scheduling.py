"""Which tenant is served next: the one that was served the fewest tokens.

Start-time fair queueing: each tenant has a virtual time, which is the number of tokens it was
served. A tenant that had no work joins at the virtual time of the tenant being served, so it
neither catches up on the past nor waits behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

#: Tenants whose virtual time is kept before those that are behind are forgotten.
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
        """Note that a tenant without work has work again."""
        self._virtual_times[tenant_id] = max(
            self._virtual_times.get(tenant_id, 0.0), self._virtual_clock
        )

    def leave(self, tenant_id: str) -> None:
        """Note that a tenant has no more work; what it was served ahead of others is kept."""
        if self._virtual_times.get(tenant_id, 0.0) <= self._virtual_clock:
            self._virtual_times.pop(tenant_id, None)
        if len(self._virtual_times) > MAX_TENANTS:
            self._virtual_times = {
                name: time
                for name, time in self._virtual_times.items()
                if time > self._virtual_clock
            }

    def pick(self, tenant_id: str, num_tokens: float) -> None:
        """Serve a tenant, and charge it for the tokens."""
        self._virtual_clock = max(self._virtual_clock, self._virtual_times.get(tenant_id, 0.0))
        self.charge(tenant_id, num_tokens)

    def charge(self, tenant_id: str, num_tokens: float) -> None:
        """Charge a tenant for tokens that it was served; negative numbers are refunds."""
        self._virtual_times[tenant_id] = (
            self._virtual_times.get(tenant_id, self._virtual_clock) + num_tokens
        )

    def sort_least_served(self, tenant_ids: Iterable[str]) -> list[str]:
        """Tenants, least served first; of two that are equal the first stays first."""
        return sorted(
            tenant_ids, key=lambda each: self._virtual_times.get(each, self._virtual_clock)
        )


P = ParamSpec("P")
T = TypeVar("T")
#: How long the operations of one turn should take together.
TARGET_BATCH_SECONDS = 0.005
MAX_OPERATIONS = 32
#: How much the newest operation says about the next.
_EMA_WEIGHT = 0.2


class AdaptiveBatchSize:
    """A running mean of how long an operation takes."""

    def __init__(self) -> None:
        self._mean_seconds = TARGET_BATCH_SECONDS

    @property
    def max_operations(self) -> int:
        """How many operations the next turn may have."""
        return max(
            1, min(MAX_OPERATIONS, int(TARGET_BATCH_SECONDS / max(self._mean_seconds, 1e-6)))
        )

    def record(self, seconds: float) -> None:
        """Learn how long an operation took; a slow one counts at once."""
        mean = self._mean_seconds + _EMA_WEIGHT * (seconds - self._mean_seconds)
        self._mean_seconds = max(mean, seconds) if seconds > TARGET_BATCH_SECONDS else mean

    def run_timed(self, operation: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Do something and learn how long it took."""
        started = time.perf_counter()
        try:
            return operation(*args, **options)
        finally:
            self.record(time.perf_counter() - started)
