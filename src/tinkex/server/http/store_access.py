"""The store, asked from an event loop: reads on a thread, writes by the store's own writer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tinkex import clock
from tinkex.server.http.request_context import CallerIdentity, Services, run_in_thread
from tinkex.store import accounting
from tinkex.store.database import Connection
from tinkex.store.records import AuditRecord, CheckpointRecord

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


def record_event(db: Connection, identity: CallerIdentity, event: str, **details: Any) -> None:
    """Write down an event, named resource_action, and by whose key it happened."""
    _insert_entry(db, identity, event, details)


def record_checkpoint_event(
    db: Connection,
    identity: CallerIdentity,
    event: str,
    checkpoint: CheckpointRecord,
    **details: Any,
) -> None:
    """Write down what was done to a checkpoint."""
    named = {"checkpoint_id": checkpoint.path.checkpoint_id, "tinker_path": str(checkpoint.path)}
    _insert_entry(db, identity, event, named | details, checkpoint)


def _insert_entry(
    db: Connection,
    identity: CallerIdentity,
    event: str,
    details: dict[str, Any],
    checkpoint: CheckpointRecord | None = None,
) -> None:
    entry = AuditRecord(
        tenant_id=identity.tenant_id,
        at=clock.now(),
        event=event,
        details={"actor": identity.urn, "key_id": identity.key_id, **details},
        run_id=checkpoint.run_id if checkpoint is not None else None,
        tinker_path=str(checkpoint.path) if checkpoint is not None else None,
    )
    accounting.insert_audit(db, entry)
