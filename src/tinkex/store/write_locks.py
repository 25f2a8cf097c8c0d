"""The locks of a write transaction on PostgreSQL. SQLite has one writer and needs none.

Every transaction holds the writer lock: exclusive by default, which excludes all other writers, or
shared. Transactions that share it take the locks of the leases and sampling sessions that they
write for. All locks are taken in the same order when the transaction begins, so they never cause a
deadlock.

* A lease lock makes the check of a worker's epoch and the write one step. A transaction that takes
  the lease waits for the transactions of the previous owner.
* A lock of a sampling session makes the numbers of its completions grow in commit order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa

#: Key of the writer lock.
WRITER_LOCK = 0x74696E6B6578
#: First keys of the other locks.
_LEASE_CLASS, _SAMPLER_CLASS = 0x74780001, 0x74780002
#: Sampling sessions are hashed to this many locks.
_NUM_SAMPLER_LOCKS = 1024
#: Locks of sampling sessions per transaction: the lock table has 64 entries per connection.
MAX_SAMPLER_LOCKS = 16

_SETTINGS = (
    "set_config('lock_timeout', :lock_timeout, true), "
    "set_config('idle_in_transaction_session_timeout', :idle_timeout, true)"
)
# The settings come first, and are local: poolers give a connection to others after a transaction.
_LOCK_EXCLUSIVE = sa.text(f"SELECT {_SETTINGS}, pg_advisory_xact_lock(:writer)")
_LOCK_SHARED = sa.text(f"SELECT {_SETTINGS}, pg_advisory_xact_lock_shared(:writer)")
_LOCK_KEYS = sa.text(
    f"SELECT {_SETTINGS}, pg_advisory_xact_lock_shared(:writer), pg_advisory_xact_lock(class, key) "
    "FROM unnest(CAST(:classes AS int[]), CAST(:keys AS int[])) AS locks(class, key)"
)


@dataclass(frozen=True, slots=True)
class WriteLocks:
    """The locks of one write."""

    is_exclusive: bool = False
    lease_keys: frozenset[int] = frozenset()
    sampler_keys: frozenset[int] = frozenset()

    def __or__(self, other: WriteLocks) -> WriteLocks:
        return WriteLocks(
            self.is_exclusive or other.is_exclusive,
            self.lease_keys | other.lease_keys,
            self.sampler_keys | other.sampler_keys,
        )

    def can_share_commit(self, other: WriteLocks) -> bool:
        """Return whether writes with these locks may share a transaction.

        An exclusive one must be short, and a transaction takes a limited number of locks.
        """
        if self.is_exclusive != other.is_exclusive:
            return False
        return len(self.sampler_keys | other.sampler_keys) <= MAX_SAMPLER_LOCKS

    def acquire(self, db: sa.Connection, *, lock_seconds: float, idle_seconds: float) -> None:
        """Take the locks at the beginning of a transaction on PostgreSQL.

        A transaction whose process is cut off ends after `idle_seconds`, which frees its locks.
        """
        parameters = {
            "lock_timeout": str(max(1, round(lock_seconds * 1000))),
            "idle_timeout": str(round(idle_seconds * 1000)),
            "writer": WRITER_LOCK,
        }
        if self.is_exclusive:
            db.execute(_LOCK_EXCLUSIVE, parameters)
            return
        keys = [(_LEASE_CLASS, key) for key in sorted(self.lease_keys)]
        keys += [(_SAMPLER_CLASS, key) for key in sorted(self.sampler_keys)]
        if not keys:
            db.execute(_LOCK_SHARED, parameters)
            return
        classes, numbers = zip(*keys, strict=True)
        db.execute(_LOCK_KEYS, parameters | {"classes": list(classes), "keys": list(numbers)})


#: Excludes all other writers.
EXCLUSIVE = WriteLocks(is_exclusive=True)
#: For writes that are correct beside any write that is not exclusive.
SHARED = WriteLocks()


def lease_locks(*names: str) -> WriteLocks:
    """Return the locks of writes that depend on leases."""
    return WriteLocks(lease_keys=frozenset(zlib.crc32(name.encode()) >> 1 for name in names))


def sampler_locks(sampler_ids: Iterable[str | None]) -> WriteLocks:
    """Return the locks of writes that store completions of sampling sessions; None means none."""
    keys = {
        zlib.crc32(sampler_id.encode()) % _NUM_SAMPLER_LOCKS
        for sampler_id in sampler_ids
        if sampler_id is not None
    }
    return WriteLocks(sampler_keys=frozenset(keys))
