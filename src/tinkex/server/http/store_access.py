"""Access to the store from the event loop, and audit log entries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from tinkex import clock
from tinkex.server.http.request_context import CallerIdentity, Services, run_in_thread
from tinkex.store import accounting
from tinkex.store.database import Connection
from tinkex.store.records import AuditRecord, CheckpointRecord
from tinkex.store.write_locks import EXCLUSIVE, WriteLocks

T = TypeVar("T")


async def read(services: Services, query: Callable[[Connection], T]) -> T:
    """Run a read-only query on a thread."""
    return await run_in_thread(services.database.read, query)


async def write(
    services: Services, transaction: Callable[[Connection], T], locks: WriteLocks = EXCLUSIVE
) -> T:
    """Run a transaction on the store's writer and wait for its commit."""
    return await await_store_future(services.database.write_soon(transaction, locks))


async def await_store_future(future: Future[T]) -> T:
    """Wait for a future of the store.

    Shielded: a client that disconnects must not cancel a transaction that is already queued.
    """
    return await asyncio.shield(asyncio.wrap_future(future))


def record_event(db: Connection, identity: CallerIdentity, event: str, **details: object) -> None:
    """Add an audit log entry with the caller's key; events are named resource_action."""
    _insert_entry(db, identity, event, details)


def record_checkpoint_event(
    db: Connection,
    identity: CallerIdentity,
    event: str,
    checkpoint: CheckpointRecord,
    **details: object,
) -> None:
    """Add an audit log entry about a checkpoint."""
    ids = {"checkpoint_id": checkpoint.path.checkpoint_id, "tinker_path": str(checkpoint.path)}
    _insert_entry(db, identity, event, ids | details, checkpoint)


def _insert_entry(
    db: Connection,
    identity: CallerIdentity,
    event: str,
    details: Mapping[str, object],
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
