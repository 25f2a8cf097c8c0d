"""Start-time fair queueing of tenants, by tokens.

Each tenant has a virtual time, which is the number of tokens it was served. A tenant that had no
work joins at the virtual time of the tenant being served, so it neither catches up on the past nor
waits behind it.
"""

from __future__ import annotations

from collections.abc import Iterable

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
