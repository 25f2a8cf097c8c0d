"""Who alone may do a thing, until when; every new owner gets a higher number."""

from __future__ import annotations

import sqlalchemy as sa

from tinkex.store.schema import leases

_HELD = sa.and_(leases.c.name == sa.bindparam("lease"), leases.c.epoch == sa.bindparam("number"))
_HOLDS = sa.select(leases.c.name).where(_HELD)
_KEEP = sa.update(leases).where(_HELD)


def acquire(db: sa.Connection, name: str, owner: str, *, now: float, seconds: float) -> int | None:
    """Take a lease that is free, expired or one's own; None if somebody else holds it.

    The number that comes back proves it. Call it inside a write, where nobody comes between.
    """
    held = db.execute(sa.select(leases).where(leases.c.name == name)).one_or_none()
    if held is None:
        first = {"name": name, "owner": owner, "epoch": 1, "until": now + seconds}
        db.execute(sa.insert(leases).values(first))
        return 1
    if held.owner != owner and held.until > now:
        return None
    epoch: int = held.epoch + 1
    taken = {"owner": owner, "epoch": epoch, "until": now + seconds}
    db.execute(sa.update(leases).where(leases.c.name == name).values(taken))
    return epoch


def renew(db: sa.Connection, name: str, epoch: int, *, now: float, seconds: float) -> bool:
    """Keep a lease for longer; False if somebody else has taken it."""
    longer = {"lease": name, "number": epoch, "until": now + seconds}
    return bool(db.execute(_KEEP, longer).rowcount)


def holds(db: sa.Connection, name: str, epoch: int) -> bool:
    """Whether nobody has taken the lease since; a late owner may go on until somebody does."""
    return db.scalar(_HOLDS, {"lease": name, "number": epoch}) is not None


def release(db: sa.Connection, name: str, epoch: int) -> None:
    """Let somebody else take the lease at once. The row stays: numbers must not begin anew."""
    db.execute(_KEEP, {"lease": name, "number": epoch, "until": 0.0})
