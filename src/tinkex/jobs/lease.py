"""Leases: at most one worker serves a group, and at most one coordinates the groups of a store."""

from __future__ import annotations

import threading
import time
from functools import partial

from tinkex import clock
from tinkex.errors import StoreBusy, StoreError
from tinkex.jobs.result_log import LeaseLost
from tinkex.logs import get_logger
from tinkex.store import coordination
from tinkex.store.coordination import LeaseState
from tinkex.store.database import Connection, Database
from tinkex.store.write_locks import lease_locks

LOG = get_logger(__name__)
COORDINATOR_LEASE = "coordinator"
CONTROLLER_LEASE = "controller"
#: An owner that does not renew for this long loses its lease.
LEASE_SECONDS = 20.0
RENEW_SECONDS = 5.0


class LeaseWatch:
    """Detects, by the monotonic clock, that the owner of a lease has stopped renewing it."""

    def __init__(self, expiry_seconds: float = LEASE_SECONDS) -> None:
        self.last_state: LeaseState | None = None
        self._expiry_seconds = expiry_seconds
        self._unchanged_since = 0.0

    def observe(self, state: LeaseState, now: float) -> None:
        """Record the state read from the store."""
        if state != self.last_state:
            self.last_state, self._unchanged_since = state, now

    def expired_state(self, now: float) -> LeaseState | None:
        """Return the state if it has not changed for the length of a lease."""
        return self.last_state if now - self._unchanged_since >= self._expiry_seconds else None


class WorkerLease:
    """The lease of this worker, renewed by a thread because an engine step may be long."""

    def __init__(self, database: Database, name: str, owner: str) -> None:
        self._database = database
        self.name = name
        self._locks = lease_locks(name)
        self._is_lost = False
        self._stop_event = threading.Event()
        self.epoch = self._acquire(owner)
        self._thread = threading.Thread(target=self._renew_loop, name="lease", daemon=True)
        self._thread.start()

    def _acquire(self, owner: str) -> int:
        watch = LeaseWatch()
        while True:
            expired = watch.expired_state(time.monotonic())
            try:
                acquired = self._database.write(
                    partial(_try_acquire, name=self.name, owner=owner, expired=expired),
                    self._locks,
                )
            except StoreBusy as error:
                # A worker that was cut off in a transaction holds the lock until that times out.
                LOG.warning("cannot take the lease %r yet: %s", self.name, error)
                continue
            if isinstance(acquired, int):
                return acquired
            if watch.last_state is None:
                LOG.warning("another worker holds the lease %r; waiting until it ends", self.name)
            watch.observe(acquired, time.monotonic())
            time.sleep(1.0)

    def check(self) -> None:
        """Raise LeaseLost if another worker has taken over."""
        if self._is_lost:
            raise LeaseLost(f"another worker holds the lease {self.name!r} now; this one ends")

    def _renew_loop(self) -> None:
        while not self._stop_event.wait(RENEW_SECONDS):
            try:
                is_renewed = self._database.write(
                    lambda db: coordination.renew_lease(
                        db, self.name, self.epoch, until=_expires_at()
                    ),
                    self._locks,
                )
            except StoreError as error:
                LOG.warning("cannot renew the worker's lease: %s", error)
                continue
            if not is_renewed:
                self._is_lost = True
                return

    def release(self) -> None:
        """Release the lease, so that the next worker starts at once."""
        self._stop_event.set()
        self._thread.join()
        if not self._is_lost:
            self._database.write(
                lambda db: coordination.release_lease(db, self.name, self.epoch), self._locks
            )


class CoordinatorLease:
    """A right that one of several processes holds, such as to coordinate the groups of a store."""

    def __init__(self, database: Database, owner: str, *, name: str = COORDINATOR_LEASE) -> None:
        self._database = database
        self._name = name
        self._locks = lease_locks(name)
        self._owner = owner
        self._watch = LeaseWatch()
        self._epoch: int | None = None
        self._renew_at = 0.0

    def hold(self) -> bool:
        """Renew the lease or try to take it; returns whether this worker holds it."""
        now = time.monotonic()
        if self._epoch is not None and now < self._renew_at:
            return True
        if self._epoch is not None and not self._renew(self._epoch):
            self._epoch = None
        if self._epoch is None:
            self._epoch = self._acquire(now)
        self._renew_at = now + RENEW_SECONDS
        return self._epoch is not None

    def _renew(self, epoch: int) -> bool:
        return self._database.write(
            lambda db: coordination.renew_lease(db, self._name, epoch, until=_expires_at()),
            self._locks,
        )

    def _acquire(self, now: float) -> int | None:
        expired = self._watch.expired_state(now)
        acquired = self._database.write(
            partial(_try_acquire, name=self._name, owner=self._owner, expired=expired),
            self._locks,
        )
        if isinstance(acquired, int):
            return acquired
        self._watch.observe(acquired, now)
        return None

    def release(self) -> None:
        """Release the lease, so that another worker takes it at once."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            self._database.write(
                lambda db: coordination.release_lease(db, self._name, epoch),
                self._locks,
            )


def _try_acquire(
    db: Connection, name: str, owner: str, expired: LeaseState | None
) -> int | LeaseState:
    return coordination.acquire_lease(db, name, owner, until=_expires_at(), expired=expired)


def _expires_at() -> float:
    return clock.now() + LEASE_SECONDS
