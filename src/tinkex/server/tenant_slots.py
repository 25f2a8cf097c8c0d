"""Concurrency limit per tenant, so that a burst of one tenant's requests queues behind itself."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

#: Requests of one tenant that an API process works on at the same time. More would only wait for
#: the same few threads and the same writer, ahead of other tenants' requests.
MAX_ACTIVE_REQUESTS = 8


class TenantSlots:
    """One semaphore per tenant with active requests."""

    def __init__(self, max_active: int = MAX_ACTIVE_REQUESTS) -> None:
        self._max_active = max_active
        self._semaphores: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def semaphore_for(self, tenant_id: str) -> asyncio.Semaphore:
        """The tenant's semaphore; it lives as long as a request holds it or waits for it."""
        semaphore = self._semaphores.get(tenant_id)
        if semaphore is None:
            semaphore = self._semaphores[tenant_id] = asyncio.Semaphore(self._max_active)
        return semaphore
