"""Who serves this store now, and how to wake them."""

from __future__ import annotations

import sqlalchemy as sa

from tinkex.store.dialects import dialect_insert
from tinkex.store.records import ProcessRecord
from tinkex.store.schema import processes


def register_process(db: sa.Connection, process: ProcessRecord) -> None:
    """Write down that a process serves; what was known of the same id is replaced."""
    values = process.to_columns()
    statement = dialect_insert(db.dialect.name, processes).values(values)
    db.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


def unregister_process(db: sa.Connection, process_id: str) -> None:
    """Forget a process that has ended."""
    db.execute(sa.delete(processes).where(processes.c.id == process_id))


def list_alive_processes(db: sa.Connection, role: str, *, since: float) -> list[ProcessRecord]:
    """Processes of a role that were seen since then, oldest first."""
    query = sa.select(processes).where(processes.c.role == role, processes.c.seen_at >= since)
    ordered = query.order_by(processes.c.started_at, processes.c.id)
    return [ProcessRecord.from_row(row) for row in db.execute(ordered)]


def delete_dead_processes(db: sa.Connection, *, before: float, after: float) -> None:
    """Delete processes last seen before a moment, or after one that has yet to come.

    The latter were entered by a server that stopped before its machine's clock was set back.
    """
    is_dead = sa.or_(processes.c.seen_at < before, processes.c.seen_at > after)
    db.execute(sa.delete(processes).where(is_dead))
