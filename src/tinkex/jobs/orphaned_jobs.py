"""Cancel jobs whose API process is gone: their clients have lost the connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tinkex import clock
from tinkex.jobs.queue import CANCEL_PREFIX, cancel_job
from tinkex.jobs.wakeup import WakeupSender
from tinkex.logs import get_logger
from tinkex.store import coordination
from tinkex.store.database import Connection, Database
from tinkex.store.write_locks import SHARED

LOG = get_logger(__name__)
#: A process without a heartbeat for this time, three of them, counts as gone.
SILENT_SECONDS = 15.0
#: How long it must be gone. By the monotonic clock: after the machine has slept, or the database
#: was unavailable, the process has the time for a heartbeat.
GONE_SECONDS = 10.0


class OrphanedJobs:
    """Observes which API processes are gone, and cancels their jobs."""

    def __init__(self, database: Database, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._monotonic = monotonic
        self._gone_since: dict[str, float] = {}
        self._wakeup = WakeupSender(database, "worker")

    def cancel(self) -> list[str]:
        """Cancel the jobs of processes that are gone for a while; returns their ids."""
        alive_since = clock.now() - SILENT_SECONDS
        found = self._database.read(
            lambda db: coordination.list_jobs_of_gone_processes(db, alive_since=alive_since)
        )
        now = self._monotonic()
        self._gone_since = {each: self._gone_since.get(each, now) for each in found}
        orphaned = [
            job_id
            for process_id, job_ids in found.items()
            if now - self._gone_since[process_id] >= GONE_SECONDS
            for job_id in job_ids
        ]
        if orphaned:
            LOG.info("cancelling %d requests of API processes that are gone", len(orphaned))
            self._database.write(lambda db: _cancel_all(db, orphaned), SHARED)
            self._wakeup.notify(CANCEL_PREFIX + job_id for job_id in orphaned)
        return orphaned

    def close(self) -> None:
        """Close the socket."""
        self._wakeup.close()


def _cancel_all(db: Connection, job_ids: Iterable[str]) -> None:
    for job_id in job_ids:
        cancel_job(db, job_id)
