"""Being the only worker of a store."""

from __future__ import annotations

import threading
import time
from functools import partial

from tinkex import clock
from tinkex.errors import StoreError
from tinkex.jobs.ledger import LeaseLost
from tinkex.logs import get_logger
from tinkex.store import leases
from tinkex.store.database import Connection, Database
from tinkex.store.leases import LeaseState

LOG = get_logger(__name__)
NAME = "worker"
#: A worker that does not renew for so long has lost its place.
LEASE_SECONDS = 20.0
RENEW_SECONDS = 5.0


class LeaseWatch:
    """Notices by the monotonic clock that the owner of a lease has stopped renewing it."""

    def __init__(self) -> None:
        self.seen: LeaseState | None = None
        self._since = 0.0

    def observe(self, state: LeaseState, now: float) -> None:
        """Record what the store says."""
        if state != self.seen:
            self.seen, self._since = state, now

    def expired(self, now: float) -> LeaseState | None:
        """The state, if it has not changed for the length of a lease."""
        return self.seen if now - self._since >= LEASE_SECONDS else None


class Lease:
    """The right to be the worker; renewed by a thread, because a turn of the engine may be long."""

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self._is_lost = False
        self._ended = threading.Event()
        self.epoch = self._acquire(owner)
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def _acquire(self, owner: str) -> int:
        watch = LeaseWatch()
        while True:
            expired = watch.expired(time.monotonic())
            found = self._database.write(partial(_acquire, owner=owner, expired=expired))
            if isinstance(found, int):
                return found
            if watch.seen is None:
                LOG.warning("another worker serves this store; waiting until it ends")
            watch.observe(found, time.monotonic())
            time.sleep(1.0)

    def check(self) -> None:
        """Raise if somebody else has taken over."""
        if self._is_lost:
            raise LeaseLost("another worker serves this store now; this one ends")

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            try:
                held = self._database.write(
                    lambda db: leases.renew(db, NAME, self.epoch, until=_until())
                )
            except StoreError as error:
                LOG.warning("cannot renew the worker's place: %s", error)
                continue
            if not held:
                self._is_lost = True
                return

    def release(self) -> None:
        """Let the next worker begin at once."""
        self._ended.set()
        self._thread.join()
        if not self._is_lost:
            self._database.write(lambda db: leases.release(db, NAME, self.epoch))


def _acquire(db: Connection, owner: str, expired: LeaseState | None) -> int | LeaseState:
    return leases.acquire(db, NAME, owner, until=_until(), expired=expired)


def _until() -> float:
    return clock.now() + LEASE_SECONDS
