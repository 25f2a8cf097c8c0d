"""Writing outcomes down: in the order they happened, without keeping the engine waiting.

The engine goes on while a commit is under way; results are told only after it. If a commit fails,
the engine's memory is ahead of the store, so the worker must end and begin again from the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from tinkex import clock
from tinkex.errors import StoreUnavailable, TinkexError
from tinkex.jobs.bells import Ringer
from tinkex.jobs.outcomes import Failed, Outcome
from tinkex.store import jobs, leases, steps
from tinkex.store.database import Connection, Database
from tinkex.store.records import Job, Step

#: Commits under way before the engine waits for one.
MAX_PENDING = 32


class LeaseLost(TinkexError):
    """Another worker serves this store."""


class Entry(NamedTuple):
    """A promise and what came of it."""

    job: Job
    outcome: Outcome
    applied: int | None
    started_at: float


class Ledger:
    """The worker's side of the store."""

    def __init__(self, database: Database, epoch: int) -> None:
        self._database = database
        self._epoch = epoch
        self._ringer = Ringer(database, "api")
        self._pending: deque[Future[list[str]]] = deque()
        self._has_failed = False

    def start(self, job_ids: Sequence[str]) -> None:
        """Note that these are being done."""
        ids, now = list(job_ids), clock.now()
        self._push(self._write(lambda db: _start(db, ids, now)))

    def finish(self, entries: Sequence[Entry]) -> None:
        """Write outcomes down, and tell whoever waits once they are on disk."""
        written, now = list(entries), clock.now()
        future = self._write(lambda db: _finish(db, written, now))
        future.add_done_callback(self._tell)
        self._push(future)

    def guard(self, db: Connection) -> None:
        """Raise if this worker may not write: a write failed before, or another has taken over.

        The engine goes on while commits are under way. What it did after the one that failed must
        not be written: a hole in what changed a model could never be repaired.
        """
        if self._has_failed:
            raise StoreUnavailable("a write before this one failed; the worker begins again")
        if not leases.holds(db, "worker", self._epoch):
            raise LeaseLost("another worker serves this store now; this one ends")

    def _write(self, work: Callable[[Connection], list[str]]) -> Future[list[str]]:
        def guarded(db: Connection) -> list[str]:
            is_written = False
            try:
                self.guard(db)
                told = work(db)
                is_written = True
            finally:
                # Told here too: the next write may share the transaction of this one.
                self._has_failed = self._has_failed or not is_written
            return told

        future = self._database.write_soon(guarded)
        future.add_done_callback(self._note_failure)
        return future

    def _note_failure(self, future: Future[list[str]]) -> None:
        # On the writer's thread, before it begins with what comes after.
        self._has_failed = self._has_failed or future.exception() is not None

    def _push(self, future: Future[list[str]]) -> None:
        self._pending.append(future)
        self.check()
        while len(self._pending) > MAX_PENDING:
            self._pending.popleft().result()

    def check(self) -> None:
        """Raise what a commit failed with."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def flush(self) -> None:
        """Wait until everything is on disk."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Give the bell back."""
        self._ringer.close()

    def _tell(self, future: Future[list[str]]) -> None:
        if future.exception() is None:
            self._ringer.ring(future.result())


def _start(db: Connection, ids: list[str], now: float) -> list[str]:
    jobs.start(db, ids, now)
    return []


def _finish(db: Connection, entries: list[Entry], now: float) -> list[str]:
    for entry in entries:
        # What was cancelled meanwhile is over already, and stays so.
        if jobs.finish(db, _ending(entry, now)):
            _write_down(db, entry, now)
    return [entry.job.id for entry in entries]


def _ending(entry: Entry, now: float) -> jobs.Ending:
    outcome = entry.outcome
    if isinstance(outcome, Failed):
        return jobs.Ending(
            job=entry.job,
            error=outcome.message,
            category=outcome.category,
            applied=entry.applied,
            started_at=entry.started_at,
            finished_at=now,
        )
    return jobs.Ending(
        job=entry.job,
        result=outcome.result,
        applied=entry.applied,
        started_at=entry.started_at,
        finished_at=now,
    )


def _write_down(db: Connection, entry: Entry, now: float) -> None:
    for effect in entry.outcome.effects:
        effect(db)
    if isinstance(entry.outcome, Failed):
        return
    job = entry.job
    step = Step(
        session_id=job.session_id,
        run_id=job.run_id,
        sampler_id=job.sampler_id,
        kind=job.kind,
        job_id=job.id,
        num_tokens=entry.outcome.num_tokens,
        metrics=entry.outcome.metrics,
        queued_at=job.created_at,
        started_at=entry.started_at,
        finished_at=now,
        position=job.position,
    )
    steps.insert(db, step)
