"""Audit events and hourly usage of tenants."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

import sqlalchemy as sa

from tinkex.store.dialects import dialect_insert
from tinkex.store.records import AuditRecord, UsageRecord
from tinkex.store.schema import audit, usage

#: The unit of `UsageRecord.hour`, which counts from 1970.
HOUR_SECONDS = 3600
_USAGE_KEY = [column.name for column in usage.primary_key]
#: Where a connection collects the usage of its transaction.
_COLLECTED = "tinkex_usage"
_AUDIT_COLUMNS = [column for column in audit.c if column.name != "no"]


def insert_audit(db: sa.Connection, entry: AuditRecord) -> None:
    """Store an audit event."""
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
    """Return a tenant's events in [since, until), newest first; `events` None means all kinds."""
    query = sa.select(*_AUDIT_COLUMNS).where(
        audit.c.tenant_id == tenant_id, audit.c.at >= since, audit.c.at < until
    )
    if events is not None:
        query = query.where(audit.c.event.in_(events))
    ordered = query.order_by(audit.c.at.desc(), audit.c.no.desc()).limit(limit)
    return [AuditRecord.from_row(row) for row in db.execute(ordered)]


def add_usage(  # noqa: PLR0913 - the columns of the sum, by name
    db: sa.Connection,
    *,
    tenant_id: str,
    session_id: str,
    run_id: str | None,
    base_model: str,
    kind: str,
    amount: int,
    now: float,
) -> None:
    """Add to the usage of the current hour; `run_id` is None for samples of base models.

    It is stored at the end of the transaction.
    """
    hour = math.floor(now / HOUR_SECONDS)
    key = (tenant_id, session_id, run_id or "", base_model, kind, hour)
    collected_usage(db).append((key, amount))


@contextlib.contextmanager
def collect_usage(db: sa.Connection) -> Iterator[None]:
    """Collect the usage that a transaction adds, and store the sums at its end.

    Rows are updated in the order of their keys: several workers add to the same ones, and another
    order could deadlock.
    """
    collected: list[tuple[tuple[object, ...], int]] = []
    db.info[_COLLECTED] = collected
    yield
    sums: Counter[tuple[object, ...]] = Counter()
    for key, amount in collected:
        sums[key] += amount
    for key in sorted(sums):
        values = dict(zip(_USAGE_KEY, key, strict=True)) | {"amount": sums[key]}
        db.execute(_upsert_usage(db.dialect.name), values)


def collected_usage(db: sa.Connection) -> list[tuple[tuple[object, ...], int]]:
    """Return what the transaction has collected; a write that is rolled back removes its part."""
    collected: list[tuple[tuple[object, ...], int]] = db.info[_COLLECTED]
    return collected


@cache
def _upsert_usage(dialect: str) -> sa.Executable:
    statement = dialect_insert(dialect, usage)
    increment = {"amount": usage.c.amount + statement.excluded.amount}
    return statement.on_conflict_do_update(index_elements=list(usage.primary_key), set_=increment)


def list_usage(db: sa.Connection, tenant_id: str, start: float, end: float) -> list[UsageRecord]:
    """Return a tenant's usage of all hours that overlap a time span, in order."""
    query = sa.select(usage).where(
        usage.c.tenant_id == tenant_id,
        usage.c.hour >= math.floor(start / HOUR_SECONDS),
        usage.c.hour < math.ceil(end / HOUR_SECONDS),
    )
    ordered = query.order_by(usage.c.hour, usage.c.session_id, usage.c.run_id, usage.c.kind)
    return [UsageRecord.from_row(row) for row in db.execute(ordered)]


def usage_totals(db: sa.Connection, tenant_id: str, run_id: str) -> dict[str, int]:
    """Return a model's total usage by kind."""
    query = sa.select(usage.c.kind, sa.func.sum(usage.c.amount)).where(
        usage.c.tenant_id == tenant_id, usage.c.run_id == run_id
    )
    return {kind: int(amount) for kind, amount in db.execute(query.group_by(usage.c.kind))}
