"""What tenants did that is worth remembering."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tinkex.store.records import AuditRecord
from tinkex.store.schema import audit

_AUDIT_COLUMNS = [column for column in audit.c if column.name != "no"]


def insert_audit(db: sa.Connection, entry: AuditRecord) -> None:
    """Write down an event."""
    db.execute(sa.insert(audit).values(entry.to_columns()))


def list_audit(
    db: sa.Connection,
    tenant_id: str,
    *,
    since: float,
    until: float,
    events: Sequence[str] | None,
    limit: int = 1000,
) -> list[AuditRecord]:
    """A tenant's events from `since` to just before `until`, newest first; None is every kind."""
    query = sa.select(*_AUDIT_COLUMNS).where(
        audit.c.tenant_id == tenant_id, audit.c.at >= since, audit.c.at < until
    )
    if events is not None:
        query = query.where(audit.c.event.in_(events))
    ordered = query.order_by(audit.c.at.desc(), audit.c.no.desc()).limit(limit)
    return [AuditRecord.from_row(row) for row in db.execute(ordered)]
