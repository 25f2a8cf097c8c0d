"""Fetch the queued jobs of a group from the store into the worker's queue."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

from tinkex.checkpoint.storage import FileStorage
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
#: Interval of the search for jobs that were committed after jobs with higher numbers.
LATE_SECONDS = 1.0
#: Interval of the search for those that are later by many numbers.
ALL_SECONDS = 60.0
#: Numbers of fetched jobs that are remembered. A job that is later by more is found with all jobs.
MAX_REMEMBERED = 16_384


class FetchedNumbers:
    """The numbers of the newest fetched jobs; older ones count as fetched."""

    def __init__(self, max_numbers: int = MAX_REMEMBERED) -> None:
        self.floor = 0
        """Numbers up to this one are not remembered."""
        self._max_numbers = max_numbers
        self._numbers: set[int] = set()

    def add(self, number: int) -> None:
        """Remember a number."""
        self._numbers.add(number)
        if len(self._numbers) > self._max_numbers:
            self.floor = sorted(self._numbers)[self._max_numbers // 2]
            self._numbers = {number for number in self._numbers if number > self.floor}

    def select_new(self, numbers: Iterable[int]) -> list[int]:
        """Return the numbers that were certainly not fetched, in order."""
        return sorted({one for one in numbers if one > self.floor} - self._numbers)


class QueuePoller:
    """Reads new jobs, and knows the next sequence number of each model."""

    def __init__(
        self, database: Database, group_id: str, fair_queue: FairQueue, storage: FileStorage
    ) -> None:
        self._database = database
        self._group_id = group_id
        self._fair_queue = fair_queue
        self._storage = storage
        self._next_seq: dict[str, int] = {}
        self._last_job_no = 0
        self._fetched = FetchedNumbers()
        self._announced: set[int] = set()
        self._next_late_at = 0.0
        self._next_all_at = time.monotonic() + ALL_SECONDS
        self._is_incomplete = False
        """Whether the last fetch of all jobs failed."""

    def announce(self, number: int) -> None:
        """Record the number of a job that was committed, maybe after jobs with higher numbers."""
        if not self._database.is_sqlite and number <= self._last_job_no:
            self._announced.add(number)

    def fetch(self) -> bool:
        """Add the jobs that have arrived since the last call; returns False if the store fails."""
        while True:
            try:
                if self._fetch_some() < MAX_FETCHED_JOBS:
                    self._fetch_late()
                    return True
            except StoreError as error:
                LOG.warning("cannot poll the queue: %s", error)
                time.sleep(POLL_SECONDS)
                return False

    def fetch_all(self) -> None:
        """Add all queued jobs, also those with lower numbers that other groups have given away.

        Call it when the store knows all started jobs.
        """
        last_job_no, self._last_job_no = self._last_job_no, 0
        self._next_all_at = time.monotonic() + ALL_SECONDS
        self._is_incomplete = not self.fetch()
        if self._is_incomplete:
            # The next fetch must not return jobs that are started until then.
            self._last_job_no = last_job_no

    def fetch_all_if_due(self) -> None:
        """Fetch all again after a failure, and now and then to find very late jobs."""
        is_due = not self._database.is_sqlite and time.monotonic() >= self._next_all_at
        if is_due or self._is_incomplete:
            self.fetch_all()

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
        for job in arrived:
            self._add(job)
            self._last_job_no = job.no
            if job.payload_ref is not None:
                self._storage.prefetch_payload(job.payload_ref, job.payload_bytes)
        return len(arrived)

    def _add(self, job: JobRecord) -> None:
        self._fair_queue.add(job, self._expected_seq(job), time.monotonic())
        if not self._database.is_sqlite:
            self._fetched.add(job.no)

    def _fetch_late(self) -> None:
        """Add jobs that were committed after jobs with higher numbers had been fetched.

        Processes write to PostgreSQL at the same time. In SQLite, numbers grow in commit order.
        """
        if self._database.is_sqlite:
            return
        numbers: Iterable[int] = self._announced
        if time.monotonic() >= self._next_late_at:
            floor, last = self._fetched.floor, self._last_job_no
            numbers = self._database.read(
                lambda db: jobs.list_queued_numbers(db, floor, last, group_id=self._group_id)
            )
            self._next_late_at = time.monotonic() + LATE_SECONDS
        new = self._fetched.select_new(numbers)
        self._announced.clear()
        for start in range(0, len(new), MAX_FETCHED_JOBS):
            some = new[start : start + MAX_FETCHED_JOBS]
            late = self._database.read(
                partial(jobs.list_queued_by_number, numbers=some, group_id=self._group_id)
            )
            for job in late:
                self._add(job)

    def _expected_seq(self, job: JobRecord) -> int:
        """Return the next sequence number of a job's model."""
        if job.run_id is None or self._fair_queue.has_lane(job.tenant_id, job.run_id):
            return 0
        run_id = job.run_id
        if run_id not in self._next_seq:
            run = self._database.read(lambda db: runs.find(db, run_id))
            self._next_seq[run_id] = run.next_seq if run is not None else 0
        return self._next_seq[run_id]
