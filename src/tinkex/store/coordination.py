"""Leases (exclusive rights with a growing epoch), the registry of processes, the shared clock.

No clock decides whether a lease has expired. The owner changes the row at every renewal, and a
contender that sees the same row for the length of the lease, by its own monotonic clock, may take
it. So the wall clocks of the owner, the contender and the database may jump or disagree.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from tinkex import clock
from tinkex.store.database import Database
from tinkex.store.dialects import dialect_insert
from tinkex.store.records import ProcessRecord
from tinkex.store.schema import jobs, leases, processes

_IS_HELD = sa.and_(leases.c.name == sa.bindparam("lease"), leases.c.epoch == sa.bindparam("number"))
_FIND_HELD = sa.select(leases.c.name).where(_IS_HELD)
_UPDATE_HELD = sa.update(leases).where(_IS_HELD)
#: The `until` of a released lease.
_RELEASED_UNTIL = 0.0


class LeaseState(NamedTuple):
    """A lease that another owner holds; each renewal changes it."""

    epoch: int
    until: float


def group_lease(group_id: str) -> str:
    """Return the name of the lease of a group's worker."""
    return f"group:{group_id}" if group_id else "worker"


def acquire_lease(
    db: sa.Connection, name: str, owner: str, *, until: float, expired: LeaseState | None = None
) -> int | LeaseState:
    """Take a lease that is free, expired or already this owner's; returns the new epoch.

    Returns the lease's state if another owner holds it. `expired` is the state that the caller has
    seen unchanged for the length of the lease. Call it inside a write transaction.
    """
    row = db.execute(sa.select(leases).where(leases.c.name == name)).one_or_none()
    if row is None:
        db.execute(sa.insert(leases).values(name=name, owner=owner, epoch=1, until=until))
        return 1
    state = LeaseState(row.epoch, row.until)
    if row.owner != owner and state.until != _RELEASED_UNTIL and state != expired:
        return state
    values = {"owner": owner, "epoch": state.epoch + 1, "until": until}
    db.execute(sa.update(leases).where(leases.c.name == name).values(values))
    return state.epoch + 1


def find_lease(db: sa.Connection, name: str) -> LeaseState | None:
    """Return the state of a lease, or None if it was never taken."""
    row = db.execute(sa.select(leases).where(leases.c.name == name)).one_or_none()
    return None if row is None else LeaseState(row.epoch, row.until)


def revoke_lease(db: sa.Connection, name: str, expired: LeaseState) -> bool:
    """Release an expired lease and raise its epoch; returns False if its state has changed.

    The previous owner cannot write any more.
    """
    is_unchanged = sa.and_(
        leases.c.name == name, leases.c.epoch == expired.epoch, leases.c.until == expired.until
    )
    values = {"owner": "", "epoch": expired.epoch + 1, "until": _RELEASED_UNTIL}
    return bool(db.execute(sa.update(leases).where(is_unchanged).values(values)).rowcount)


def renew_lease(db: sa.Connection, name: str, epoch: int, *, until: float) -> bool:
    """Keep a lease; False if another owner has taken it. Each renewal needs another `until`."""
    return bool(db.execute(_UPDATE_HELD, {"lease": name, "number": epoch, "until": until}).rowcount)


def has_lease(db: sa.Connection, name: str, epoch: int) -> bool:
    """Return whether the lease still has this epoch; an expired one counts until it is taken."""
    return db.scalar(_FIND_HELD, {"lease": name, "number": epoch}) is not None


def release_lease(db: sa.Connection, name: str, epoch: int) -> None:
    """Release the lease. The row stays, because epochs must not start again."""
    db.execute(_UPDATE_HELD, {"lease": name, "number": epoch, "until": _RELEASED_UNTIL})


def register_process(db: sa.Connection, process: ProcessRecord) -> None:
    """Insert or replace the row of a running process."""
    values = process.to_columns()
    statement = dialect_insert(db.dialect.name, processes).values(values)
    db.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


def unregister_process(db: sa.Connection, process_id: str) -> None:
    """Delete the row of a process that has ended."""
    db.execute(sa.delete(processes).where(processes.c.id == process_id))


def list_alive_processes(db: sa.Connection, role: str, *, since: float) -> list[ProcessRecord]:
    """Return the processes of a role with a heartbeat since then, oldest first."""
    query = sa.select(processes).where(processes.c.role == role, processes.c.seen_at >= since)
    ordered = query.order_by(processes.c.started_at, processes.c.id)
    return [ProcessRecord.from_row(row) for row in db.execute(ordered)]


def list_jobs_of_gone_processes(db: sa.Connection, *, alive_since: float) -> dict[str, list[str]]:
    """Return unfinished jobs whose API process is gone, by process.

    Only jobs that nobody can fetch later name their process.
    """
    is_alive = sa.exists().where(
        processes.c.id == jobs.c.process_id, processes.c.seen_at >= alive_since
    )
    query = sa.select(jobs.c.process_id, jobs.c.id).where(
        jobs.c.process_id.is_not(None), jobs.c.finished_at.is_(None), ~is_alive
    )
    found: dict[str, list[str]] = {}
    for process_id, job_id in db.execute(query.order_by(jobs.c.no)):
        found.setdefault(process_id, []).append(job_id)
    return found


def delete_dead_processes(db: sa.Connection, *, before: float, after: float) -> None:
    """Delete processes last seen before `before`, or after `after`, which is in the future.

    The latter belong to a server that stopped before its machine's clock was set back.
    """
    is_dead = sa.or_(processes.c.seen_at < before, processes.c.seen_at > after)
    db.execute(sa.delete(processes).where(is_dead))


def adopt_store_clock(database: Database) -> None:
    """Use the clock of a PostgreSQL server, so that all machines of a store agree on the time.

    With SQLite all processes run on one machine, whose clock they use.
    """
    if database.is_sqlite:
        return
    query = sa.select(sa.extract("epoch", sa.func.clock_timestamp()))

    def measure(db: sa.Connection) -> float:
        return clock.measure_offset(lambda: float(db.execute(query).scalar_one()), clock.elapsed)

    clock.CLOCK.adopt_offset(database.read(measure))
