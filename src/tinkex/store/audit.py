"""What tenants did that is worth remembering."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tinkex.store.records import AuditEntry
from tinkex.store.schema import audit

_COLUMNS = [column for column in audit.c if column.name != "no"]


def note(db: sa.Connection, entry: AuditEntry) -> None:
    """Write down an event."""
    db.execute(sa.insert(audit).values(entry.values()))


def entries(
    db: sa.Connection,
    tenant_id: str,
    *,
    since: float,
    until: float,
    events: Sequence[str] | None,
    limit: int = 1000,
) -> list[AuditEntry]:
    """A tenant's events from `since` to just before `until`, newest first; None is every kind."""
    query = sa.select(*_COLUMNS).where(
        audit.c.tenant_id == tenant_id, audit.c.at >= since, audit.c.at < until
    )
    if events is not None:
        query = query.where(audit.c.event.in_(events))
    ordered = query.order_by(audit.c.at.desc(), audit.c.no.desc()).limit(limit)
    return [AuditEntry.of(row) for row in db.execute(ordered)]
