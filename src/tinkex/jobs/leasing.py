"""Being the only worker of a store."""

from __future__ import annotations

import threading
import time

from tinkex.errors import StoreError
from tinkex.jobs.ledger import LeaseLost
from tinkex.logs import get_logger
from tinkex.store import leases
from tinkex.store.database import Database

LOG = get_logger(__name__)
NAME = "worker"
#: A worker that does not renew for so long has lost its place.
LEASE_SECONDS = 20.0
RENEW_SECONDS = 5.0


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
        is_told = False
        while True:
            epoch = self._database.write(
                lambda db: leases.acquire(db, NAME, owner, now=time.time(), seconds=LEASE_SECONDS)
            )
            if epoch is not None:
                return epoch
            if not is_told:
                LOG.warning("another worker serves this store; waiting until it ends")
                is_told = True
            time.sleep(1.0)

    def check(self) -> None:
        """Raise if somebody else has taken over."""
        if self._is_lost:
            raise LeaseLost("another worker serves this store now; this one ends")

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            try:
                held = self._database.write(
                    lambda db: leases.renew(
                        db, NAME, self.epoch, now=time.time(), seconds=LEASE_SECONDS
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
        self._ended.set()
        self._thread.join()
        if not self._is_lost:
            self._database.write(lambda db: leases.release(db, NAME, self.epoch))
