"""What a tenant did is written down in the transaction that does it."""

from __future__ import annotations

from typing import Any

from tinkex import clock
from tinkex.server.call import CallerIdentity
from tinkex.store import audit
from tinkex.store.database import Connection
from tinkex.store.records import AuditRecord, CheckpointRecord


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
    audit.insert_audit(db, entry)
