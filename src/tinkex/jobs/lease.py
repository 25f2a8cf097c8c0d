"""The worker's lease: at most one worker serves a store."""

from __future__ import annotations

import threading
import time
from functools import partial

from tinkex import clock
from tinkex.errors import StoreError
from tinkex.jobs.result_log import LeaseLost
from tinkex.logs import get_logger
from tinkex.store import coordination
from tinkex.store.coordination import LeaseState
from tinkex.store.database import Connection, Database

LOG = get_logger(__name__)
LEASE_NAME = "worker"
#: A worker that does not renew for this long loses its lease.
LEASE_SECONDS = 20.0
RENEW_SECONDS = 5.0


class LeaseWatch:
    """Detects, by the monotonic clock, that the owner of a lease has stopped renewing it."""

    def __init__(self) -> None:
        self.last_state: LeaseState | None = None
        self._unchanged_since = 0.0

    def observe(self, state: LeaseState, now: float) -> None:
        """Record the state read from the store."""
        if state != self.last_state:
            self.last_state, self._unchanged_since = state, now

    def expired_state(self, now: float) -> LeaseState | None:
        """Return the state if it has not changed for the length of a lease."""
        return self.last_state if now - self._unchanged_since >= LEASE_SECONDS else None


class WorkerLease:
    """The lease of this worker, renewed by a thread because an engine step may be long."""

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self._is_lost = False
        self._stop_event = threading.Event()
        self.epoch = self._acquire(owner)
        self._thread = threading.Thread(target=self._renew_loop, name="lease", daemon=True)
        self._thread.start()

    def _acquire(self, owner: str) -> int:
        watch = LeaseWatch()
        while True:
            expired = watch.expired_state(time.monotonic())
            acquired = self._database.write(
                partial(_acquire_in_transaction, owner=owner, expired=expired)
            )
            if isinstance(acquired, int):
                return acquired
            if watch.last_state is None:
                LOG.warning("another worker serves this store; waiting until it ends")
            watch.observe(acquired, time.monotonic())
            time.sleep(1.0)

    def check(self) -> None:
        """Raise LeaseLost if another worker has taken over."""
        if self._is_lost:
            raise LeaseLost("another worker serves this store now; this one ends")

    def _renew_loop(self) -> None:
        while not self._stop_event.wait(RENEW_SECONDS):
            try:
                is_renewed = self._database.write(
                    lambda db: coordination.renew_lease(
                        db, LEASE_NAME, self.epoch, until=_expires_at()
                    )
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
            self._database.write(lambda db: coordination.release_lease(db, LEASE_NAME, self.epoch))


def _acquire_in_transaction(
    db: Connection, owner: str, expired: LeaseState | None
) -> int | LeaseState:
    return coordination.acquire_lease(db, LEASE_NAME, owner, until=_expires_at(), expired=expired)


def _expires_at() -> float:
    return clock.now() + LEASE_SECONDS
