"""Quotas of tenants, and their current usage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Self

import sqlalchemy as sa

from tinkex.errors import ConfigError
from tinkex.ids import TinkerPath
from tinkex.store.accounting import HOUR_SECONDS
from tinkex.store.records import RunState
from tinkex.store.schema import checkpoints, jobs, runs, sessions, tenants, usage

#: Kinds of usage that count for `tokens_per_hour`.
_TOKEN_KINDS = ("training", "prefill", "prefill_cached", "sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Limits of a tenant; 0 means unlimited."""

    models: int = 0
    """Trainable models in unfinished sessions."""
    checkpoints: int = 0
    """Saved checkpoints."""
    stored_bytes: int = 0
    """Bytes of all checkpoint files, including unnamed sampler weights."""
    tokens_per_hour: int = 0
    """Tokens trained, prefilled and sampled within a full hour."""
    sessions_per_hour: int = 0
    """Sessions created since the last full hour."""

    def __post_init__(self) -> None:
        for name in self.names():
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 0 or more")

    @classmethod
    def names(cls) -> list[str]:
        """The names of all quotas, in display order."""
        return [field.name for field in fields(cls)]

    def with_overrides(self, overrides: Mapping[str, int] | None) -> Self:
        """Return these quotas with a tenant's overrides; unknown names are ignored."""
        known = {name: value for name, value in (overrides or {}).items() if name in self.names()}
        return replace(self, **known)

    @property
    def is_unlimited(self) -> bool:
        """Whether no quota is set."""
        return not any(getattr(self, name) for name in self.names())


class StoredCheckpoints(NamedTuple):
    """The number and size of a tenant's checkpoints."""

    num_checkpoints: int
    num_bytes: int


_FIND_OVERRIDES = sa.select(tenants.c.quotas).where(tenants.c.id == sa.bindparam("tenant_id"))
_OPEN_TOKENS = sa.select(sa.func.coalesce(sa.func.sum(jobs.c.num_tokens), 0)).where(
    jobs.c.finished_at.is_(None), jobs.c.tenant_id == sa.bindparam("tenant_id")
)
_HOUR_TOKENS = sa.select(sa.func.coalesce(sa.func.sum(usage.c.amount), 0)).where(
    usage.c.tenant_id == sa.bindparam("tenant_id"),
    usage.c.hour == sa.bindparam("this_hour"),
    usage.c.kind.in_(_TOKEN_KINDS),
)


def get_quotas(db: sa.Connection, tenant_id: str, defaults: Quotas) -> Quotas:
    """Return the quotas of a tenant: its overrides, and the defaults for the rest."""
    return defaults.with_overrides(db.scalar(_FIND_OVERRIDES, {"tenant_id": tenant_id}))


def set_overrides(db: sa.Connection, tenant_id: str, overrides: Mapping[str, int] | None) -> None:
    """Replace the overrides of a tenant; None restores the defaults."""
    db.execute(sa.update(tenants).where(tenants.c.id == tenant_id).values(quotas=overrides))


def count_models(db: sa.Connection, tenant_id: str) -> int:
    """Count a tenant's trainable models in unfinished sessions."""
    query = (
        sa.select(sa.func.count())
        .select_from(runs.join(sessions, sessions.c.id == runs.c.session_id))
        .where(
            runs.c.tenant_id == tenant_id,
            runs.c.state.in_([RunState.CREATING, RunState.READY]),
            sessions.c.finished_at.is_(None),
        )
    )
    return db.scalar(query) or 0


def sum_stored(
    db: sa.Connection, tenant_id: str, now: float, replaced: TinkerPath | None = None
) -> StoredCheckpoints:
    """Sum up a tenant's checkpoints, except the one at the path `replaced`.

    Unnamed sampler weights count only with their bytes.
    """
    is_young = sa.or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > now)
    is_kept = sa.and_(
        checkpoints.c.tenant_id == tenant_id, checkpoints.c.deleted_at.is_(None), is_young
    )
    if replaced is not None:
        is_replaced = sa.and_(
            checkpoints.c.run_id == replaced.run_id,
            checkpoints.c.segment == replaced.segment,
            checkpoints.c.name == replaced.name,
        )
        is_kept = sa.and_(is_kept, ~is_replaced)
    num_named = sa.func.sum(sa.case((checkpoints.c.is_ephemeral, 0), else_=1))
    query = sa.select(num_named, sa.func.sum(checkpoints.c.size_bytes)).where(is_kept)
    count, num_bytes = db.execute(query).one()
    return StoredCheckpoints(int(count or 0), int(num_bytes or 0))


def count_tokens_this_hour(db: sa.Connection, tenant_id: str, now: float) -> int:
    """Count the tokens that a tenant has used since the last full hour."""
    hour = int(now // HOUR_SECONDS)
    return int(db.scalar(_HOUR_TOKENS, {"tenant_id": tenant_id, "this_hour": hour}) or 0)


def count_sessions_this_hour(db: sa.Connection, tenant_id: str, now: float) -> int:
    """Count the sessions that a tenant has created since the last full hour."""
    since = now - now % HOUR_SECONDS
    query = sa.select(sa.func.count()).where(
        sessions.c.tenant_id == tenant_id, sessions.c.created_at >= since
    )
    return db.scalar(query) or 0


def count_open_tokens(db: sa.Connection, tenant_id: str) -> int:
    """Return the maximum number of tokens that a tenant's unfinished jobs may use."""
    return int(db.scalar(_OPEN_TOKENS, {"tenant_id": tenant_id}) or 0)
