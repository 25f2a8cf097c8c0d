"""Which tenant is served next: the one that was served the fewest tokens.

Start-time fair queueing: each tenant has a virtual time, which is the number of tokens it was
served. A tenant that had no work joins at the virtual time of the tenant being served, so it
neither catches up on the past nor waits behind it.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Tenants whose virtual time is kept before those that are behind are forgotten.
MAX_REMEMBERED = 1024


class FairShare:
    """The virtual time of every tenant; all tenants have the same weight."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._clock = 0.0
        """The virtual time of the tenant that was picked last."""

    def __len__(self) -> int:
        return len(self._times)

    def join(self, tenant_id: str) -> None:
        """Note that a tenant without work has work again."""
        self._times[tenant_id] = max(self._times.get(tenant_id, 0.0), self._clock)

    def leave(self, tenant_id: str) -> None:
        """Note that a tenant has no more work; what it was served ahead of others is kept."""
        if self._times.get(tenant_id, 0.0) <= self._clock:
            self._times.pop(tenant_id, None)
        if len(self._times) > MAX_REMEMBERED:
            self._times = {name: time for name, time in self._times.items() if time > self._clock}

    def pick(self, tenant_id: str, num_tokens: float) -> None:
        """Serve a tenant, and charge it for the tokens."""
        self._clock = max(self._clock, self._times.get(tenant_id, 0.0))
        self.charge(tenant_id, num_tokens)

    def charge(self, tenant_id: str, num_tokens: float) -> None:
        """Charge a tenant for tokens that it was served; negative numbers are refunds."""
        self._times[tenant_id] = self._times.get(tenant_id, self._clock) + num_tokens

    def order(self, tenant_ids: Iterable[str]) -> list[str]:
        """Tenants, least served first; of two that are equal the first stays first."""
        return sorted(tenant_ids, key=lambda each: self._times.get(each, self._clock))
