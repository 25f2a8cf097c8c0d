"""Exclusive rights to do a thing; every new owner gets a higher epoch.

No clock decides whether a lease has expired. The owner changes the row at every renewal, and a
contender that sees the same row for the length of the lease, by its own monotonic clock, may take
it. So the wall clocks of the owner, the contender and the database may jump or disagree.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from tinkex.store.schema import leases

_IS_HELD = sa.and_(leases.c.name == sa.bindparam("lease"), leases.c.epoch == sa.bindparam("number"))
_FIND_HELD = sa.select(leases.c.name).where(_IS_HELD)
_UPDATE_HELD = sa.update(leases).where(_IS_HELD)
#: The `until` of a lease that its owner gave back.
_RELEASED_UNTIL = 0.0


class LeaseState(NamedTuple):
    """A lease that another owner holds; each renewal changes it."""

    epoch: int
    until: float


def acquire_lease(
    db: sa.Connection, name: str, owner: str, *, until: float, expired: LeaseState | None = None
) -> int | LeaseState:
    """Take a lease that is free, expired or already this owner's; returns the new epoch.

    Returns the lease's state if another owner holds it. `expired` is the state that the caller has
    seen unchanged for the length of the lease. Call it inside a write transaction.
    """
    held = db.execute(sa.select(leases).where(leases.c.name == name)).one_or_none()
    if held is None:
        db.execute(sa.insert(leases).values(name=name, owner=owner, epoch=1, until=until))
        return 1
    state = LeaseState(held.epoch, held.until)
    if held.owner != owner and state.until != _RELEASED_UNTIL and state != expired:
        return state
    taken = {"owner": owner, "epoch": state.epoch + 1, "until": until}
    db.execute(sa.update(leases).where(leases.c.name == name).values(taken))
    return state.epoch + 1


def renew_lease(db: sa.Connection, name: str, epoch: int, *, until: float) -> bool:
    """Keep a lease; False if another owner has taken it. Each renewal needs another `until`."""
    return bool(db.execute(_UPDATE_HELD, {"lease": name, "number": epoch, "until": until}).rowcount)


def has_lease(db: sa.Connection, name: str, epoch: int) -> bool:
    """Whether nobody has taken the lease since; a late owner may go on until somebody does."""
    return db.scalar(_FIND_HELD, {"lease": name, "number": epoch}) is not None


def release_lease(db: sa.Connection, name: str, epoch: int) -> None:
    """Let somebody else take the lease at once. The row stays: numbers must not begin anew."""
    db.execute(_UPDATE_HELD, {"lease": name, "number": epoch, "until": _RELEASED_UNTIL})
