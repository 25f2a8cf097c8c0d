"""The store, asked from an event loop: reads on a thread, writes by the store's own writer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tinkex.server.call import Services, run_in_thread
from tinkex.store.database import Connection

T = TypeVar("T")


async def read(services: Services, query: Callable[[Connection], T]) -> T:
    """Run work that changes nothing."""
    return await run_in_thread(services.database.read, query)


async def write(services: Services, transaction: Callable[[Connection], T]) -> T:
    """Run work in a transaction, and wait until it is on disk."""
    return await await_store_future(services.database.write_soon(transaction))


async def await_store_future(future: Future[T]) -> T:
    """What a future of the store brings.

    A client that goes away must not cancel it: the work is in the writer's hands already.
    """
    return await asyncio.shield(asyncio.wrap_future(future))
