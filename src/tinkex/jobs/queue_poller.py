"""Fetch the queued jobs of a group from the store into the worker's queue."""

from __future__ import annotations

import time

from tinkex.errors import StoreError
from tinkex.jobs.fair_queue import FairQueue
from tinkex.logs import get_logger
from tinkex.store import jobs, runs
from tinkex.store.database import Database
from tinkex.store.records import JobRecord

LOG = get_logger(__name__)
#: Poll interval without wake-up messages, and the pause after a failed poll.
POLL_SECONDS = 0.5
#: Jobs fetched per query.
MAX_FETCHED_JOBS = 1000


class QueuePoller:
    """Reads new jobs, and knows the next sequence number of each model."""

    def __init__(self, database: Database, group_id: str, fair_queue: FairQueue) -> None:
        self._database = database
        self._group_id = group_id
        self._fair_queue = fair_queue
        self._next_seq: dict[str, int] = {}
        self._last_job_no = 0

    def fetch(self) -> None:
        """Add the jobs that have arrived since the last call to the queue."""
        while True:
            try:
                if self._fetch_some() < MAX_FETCHED_JOBS:
                    return
            except StoreError as error:
                LOG.warning("cannot poll the queue: %s", error)
                time.sleep(POLL_SECONDS)
                return

    def fetch_all(self) -> None:
        """Add all queued jobs, also those with lower numbers that other groups have given away.

        Call it when the store knows all started jobs.
        """
        self._last_job_no = 0
        self.fetch()

    def advance_seq(self, job: JobRecord) -> None:
        """Record that a job of a model is finished."""
        if job.run_id is not None:
            next_seq = max(self._next_seq.get(job.run_id, 0), job.position + 1)
            self._next_seq[job.run_id] = next_seq

    def forget_seqs(self) -> None:
        """Forget the sequence numbers; call it when the store knows all finished jobs."""
        self._next_seq.clear()

    def _fetch_some(self) -> int:
        arrived = self._database.read(
            lambda db: jobs.list_queued_after(
                db, self._last_job_no, MAX_FETCHED_JOBS, group_id=self._group_id
            )
        )
        now = time.monotonic()
        for job in arrived:
            self._fair_queue.add(job, self._expected_seq(job), now)
            self._last_job_no = job.no
        return len(arrived)

    def _expected_seq(self, job: JobRecord) -> int:
        """Return the next sequence number of a job's model."""
        if job.run_id is None or self._fair_queue.has_lane(job.tenant_id, job.run_id):
            return 0
        run_id = job.run_id
        if run_id not in self._next_seq:
            run = self._database.read(lambda db: runs.find(db, run_id))
            self._next_seq[run_id] = run.next_seq if run is not None else 0
        return self._next_seq[run_id]
