"""Being the only worker of a store."""

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
#: A worker that does not renew for so long has lost its place.
LEASE_SECONDS = 20.0
RENEW_SECONDS = 5.0


class LeaseWatch:
    """Notices by the monotonic clock that the owner of a lease has stopped renewing it."""

    def __init__(self) -> None:
        self.last_state: LeaseState | None = None
        self._unchanged_since = 0.0

    def observe(self, state: LeaseState, now: float) -> None:
        """Record what the store says."""
        if state != self.last_state:
            self.last_state, self._unchanged_since = state, now

    def expired_state(self, now: float) -> LeaseState | None:
        """The state, if it has not changed for the length of a lease."""
        return self.last_state if now - self._unchanged_since >= LEASE_SECONDS else None


class WorkerLease:
    """The right to be the worker; renewed by a thread, because a turn of the engine may be long."""

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
            found = self._database.write(
                partial(_acquire_in_transaction, owner=owner, expired=expired)
            )
            if isinstance(found, int):
                return found
            if watch.last_state is None:
                LOG.warning("another worker serves this store; waiting until it ends")
            watch.observe(found, time.monotonic())
            time.sleep(1.0)

    def check(self) -> None:
        """Raise if somebody else has taken over."""
        if self._is_lost:
            raise LeaseLost("another worker serves this store now; this one ends")

    def _renew_loop(self) -> None:
        while not self._stop_event.wait(RENEW_SECONDS):
            try:
                held = self._database.write(
                    lambda db: coordination.renew_lease(
                        db, LEASE_NAME, self.epoch, until=_expires_at()
                    )
                )
            except StoreError as error:
                LOG.warning("cannot renew the worker's place: %s", error)
                continue
            if not held:
                self._is_lost = True
                return

    def release(self) -> None:
        """Let the next worker begin at once."""
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
