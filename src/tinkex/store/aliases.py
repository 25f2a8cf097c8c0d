"""Aliases: names that tenants give to checkpoints."""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from tinkex.ids import TinkerPath
from tinkex.store.checkpoints import is_live
from tinkex.store.records import CheckpointRecord
from tinkex.store.schema import aliases, checkpoints


class Alias(NamedTuple):
    """A name and the checkpoint that it means."""

    name: str
    checkpoint: CheckpointRecord

    @property
    def path(self) -> TinkerPath:
        """The path of the checkpoint."""
        return self.checkpoint.path


def _is_own(tenant_id: str, name: str) -> sa.ColumnElement[bool]:
    return sa.and_(aliases.c.tenant_id == tenant_id, aliases.c.name == name)


def _is_usable(tenant_id: str, now: float) -> sa.ColumnElement[bool]:
    """Whether the tenant can still read the checkpoint of an alias."""
    is_readable = sa.or_(checkpoints.c.is_public, checkpoints.c.tenant_id == tenant_id)
    return sa.and_(is_live(now), is_readable)


def find(db: sa.Connection, tenant_id: str, name: str, now: float) -> CheckpointRecord | None:
    """Return the checkpoint of an alias, unless it is deleted, expired or no longer published."""
    query = (
        sa.select(checkpoints)
        .join(aliases, aliases.c.checkpoint_id == checkpoints.c.id)
        .where(_is_own(tenant_id, name), _is_usable(tenant_id, now))
    )
    row = db.execute(query).one_or_none()
    return None if row is None else CheckpointRecord.from_row(row)


def set_alias(db: sa.Connection, tenant_id: str, name: str, checkpoint_id: str, now: float) -> None:
    """Let a name mean a checkpoint, instead of what it meant before."""
    values = {"checkpoint_id": checkpoint_id, "updated_at": now}
    if db.execute(sa.update(aliases).where(_is_own(tenant_id, name)).values(values)).rowcount:
        return
    db.execute(sa.insert(aliases).values(tenant_id=tenant_id, name=name, **values))


def delete(db: sa.Connection, tenant_id: str, name: str) -> bool:
    """Delete an alias; returns False if there is none."""
    return bool(db.execute(sa.delete(aliases).where(_is_own(tenant_id, name))).rowcount)


def delete_dangling(db: sa.Connection, tenant_id: str, now: float) -> None:
    """Delete a tenant's aliases of checkpoints that no longer exist."""
    live = sa.select(checkpoints.c.id).where(is_live(now))
    is_dangling = sa.and_(aliases.c.tenant_id == tenant_id, aliases.c.checkpoint_id.not_in(live))
    db.execute(sa.delete(aliases).where(is_dangling))


def count(db: sa.Connection, tenant_id: str) -> int:
    """Return the number of a tenant's aliases."""
    query = sa.select(sa.func.count()).where(aliases.c.tenant_id == tenant_id)
    return db.scalar(query) or 0


def list_all(db: sa.Connection, tenant_id: str, now: float) -> list[Alias]:
    """Return a tenant's aliases of checkpoints that it can read, by name."""
    is_own = aliases.c.tenant_id == tenant_id
    names = db.execute(
        sa.select(aliases.c.name, aliases.c.checkpoint_id).where(is_own).order_by(aliases.c.name)
    ).all()
    joined = sa.select(checkpoints).join(aliases, aliases.c.checkpoint_id == checkpoints.c.id)
    rows = db.execute(joined.where(is_own, _is_usable(tenant_id, now))).all()
    saved = {row.id: CheckpointRecord.from_row(row) for row in rows}
    return [Alias(name, saved[found]) for name, found in names if found in saved]
