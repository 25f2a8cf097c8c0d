"""Sums of the hourly usage: of a tenant by day, of all tenants, and of base models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from tinkex.store.accounting import HOUR_SECONDS
from tinkex.store.records import RunState
from tinkex.store.schema import runs, sessions, tenants, usage

_HOURS_PER_DAY = 24


class DayUsage(NamedTuple):
    """The usage of one kind within one day."""

    day: int
    """Days since 1970, in UTC."""
    kind: str
    amount: int


class ModelUser(NamedTuple):
    """What a tenant does with a base model."""

    base_model: str
    tenant: str
    """The tenant's name."""
    num_runs: int
    """Models in unfinished sessions."""
    num_tokens: int
    """Tokens trained, prefilled and sampled in the given time."""


def sum_by_day(db: sa.Connection, tenant_id: str, since: float) -> list[DayUsage]:
    """Return a tenant's usage of each kind by day, oldest first."""
    day = (usage.c.hour // _HOURS_PER_DAY).label("day")
    query = (
        sa.select(day, usage.c.kind, sa.func.sum(usage.c.amount))
        .where(usage.c.tenant_id == tenant_id, usage.c.hour >= _hour_of(since))
        .group_by(day, usage.c.kind)
        .order_by(day, usage.c.kind)
    )
    return [DayUsage(int(at), kind, int(amount)) for at, kind, amount in db.execute(query)]


def sum_by_tenant(
    db: sa.Connection, tenant_ids: Sequence[str], since: float
) -> dict[str, dict[str, int]]:
    """Return the usage of tenants by kind."""
    query = (
        sa.select(usage.c.tenant_id, usage.c.kind, sa.func.sum(usage.c.amount))
        .where(usage.c.tenant_id.in_(tenant_ids), usage.c.hour >= _hour_of(since))
        .group_by(usage.c.tenant_id, usage.c.kind)
    )
    sums: dict[str, dict[str, int]] = {tenant_id: {} for tenant_id in tenant_ids}
    for tenant_id, kind, amount in db.execute(query):
        sums[tenant_id][kind] = int(amount)
    return sums


def list_model_users(
    db: sa.Connection, kinds: tuple[str, ...], since: float, limit: int
) -> list[ModelUser]:
    """Return the tenants with models in unfinished sessions or usage of these kinds.

    The most active come first.
    """
    names = {row.id: row.name for row in db.execute(sa.select(tenants.c.id, tenants.c.name))}
    num_runs = _count_open_runs(db)
    num_tokens = _sum_by_model(db, kinds, since)
    users = [
        ModelUser(
            base_model,
            names[tenant_id],
            num_runs.get((base_model, tenant_id), 0),
            num_tokens.get((base_model, tenant_id), 0),
        )
        for base_model, tenant_id in num_runs.keys() | num_tokens.keys()
        if tenant_id in names
    ]
    users.sort(key=lambda user: (-user.num_tokens, -user.num_runs, user.base_model, user.tenant))
    return users[:limit]


def _count_open_runs(db: sa.Connection) -> dict[tuple[str, str], int]:
    query = (
        sa.select(runs.c.base_model, runs.c.tenant_id, sa.func.count())
        .select_from(runs.join(sessions, sessions.c.id == runs.c.session_id))
        .where(
            runs.c.state.in_([RunState.CREATING, RunState.READY]),
            sessions.c.finished_at.is_(None),
            sessions.c.expired_at.is_(None),
        )
        .group_by(runs.c.base_model, runs.c.tenant_id)
    )
    return {(base_model, tenant): int(count) for base_model, tenant, count in db.execute(query)}


def _sum_by_model(
    db: sa.Connection, kinds: tuple[str, ...], since: float
) -> dict[tuple[str, str], int]:
    query = (
        sa.select(usage.c.base_model, usage.c.tenant_id, sa.func.sum(usage.c.amount))
        .where(usage.c.kind.in_(kinds), usage.c.hour >= _hour_of(since))
        .group_by(usage.c.base_model, usage.c.tenant_id)
    )
    return {(base_model, tenant): int(amount) for base_model, tenant, amount in db.execute(query)}


def _hour_of(at: float) -> int:
    return math.floor(at / HOUR_SECONDS)
