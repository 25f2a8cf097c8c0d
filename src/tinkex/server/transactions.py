"""The store, asked from an event loop: reads on a thread, writes by the store's own writer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tinkex.server.call import Services, in_thread
from tinkex.store.database import Connection

T = TypeVar("T")


async def read(services: Services, work: Callable[[Connection], T]) -> T:
    """Run work that changes nothing."""
    return await in_thread(services.database.read, work)


async def write(services: Services, work: Callable[[Connection], T]) -> T:
    """Run work in a transaction, and wait until it is on disk."""
    return await settled(services.database.write_soon(work))


async def settled(future: Future[T]) -> T:
    """What a future of the store brings.

    A client that goes away must not cancel it: the work is in the writer's hands already.
    """
    return await asyncio.shield(asyncio.wrap_future(future))
