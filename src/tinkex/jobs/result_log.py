"""Store results and their effects, in order and asynchronously.

The engine continues while a commit is pending; waiters are notified only after it. If a commit
fails, the engine is ahead of the store, so the worker must restart from the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

from tinkex import clock
from tinkex.errors import StoreUnavailable, TinkexError
from tinkex.jobs.job_types import Effect, Failed, JobOutcome
from tinkex.jobs.wakeup import WakeupSender
from tinkex.store import (
    accounting,
    checkpoints,
    coordination,
    jobs,
    runs,
    samplers,
    sessions,
    steps,
)
from tinkex.store.database import Connection, Database
from tinkex.store.dialects import is_conflict
from tinkex.store.records import (
    AuditRecord,
    CheckpointRecord,
    JobRecord,
    RunState,
    SamplerRecord,
    StepRecord,
)
from tinkex.store.write_locks import (
    MAX_SAMPLER_LOCKS,
    WriteLocks,
    lease_locks,
    sampler_locks,
)

#: Pending commits before the engine waits for one.
MAX_PENDING_COMMITS = 32


class LeaseLost(TinkexError):
    """Another worker serves this group."""


class ResultEntry(NamedTuple):
    """A job and its outcome."""

    job: JobRecord
    outcome: JobOutcome
    applied: int | None
    started_at: float


class ResultLog:
    """Writes the worker's results to the store."""

    def __init__(
        self, database: Database, epoch: int, *, lease: str = "worker", group_id: str = ""
    ) -> None:
        self._database = database
        self._epoch = epoch
        self._lease = lease
        self._group_id = group_id
        self.locks = lease_locks(lease)
        """The locks of writes that call `check_fence`."""
        self._wakeup_sender = WakeupSender(database, "api")
        self._pending: deque[Future[list[str]]] = deque()
        self._has_failed = False

    def start(self, job_ids: Sequence[str]) -> None:
        """Mark jobs as running."""
        ids, now, group_id = list(job_ids), clock.now(), self._group_id

        def mark_started(db: Connection) -> list[str]:
            jobs.mark_started(db, ids, now, group_id=group_id)
            return []

        self._track(self._write(mark_started, self.locks))

    def finish(self, entries: Sequence[ResultEntry]) -> None:
        """Store outcomes, and notify waiters once they are on disk."""
        now = clock.now()
        max_samplers = len(entries) if self._database.is_sqlite else MAX_SAMPLER_LOCKS
        for part in split_by_samplers(entries, max_samplers):
            self._finish_part(part, now)

    def _finish_part(self, entries: list[ResultEntry], now: float) -> None:
        locks = self.locks | sampler_locks(entry.job.sampler_id for entry in entries)
        future = self._write(lambda db: _store_results(db, entries, now), locks)
        future.add_done_callback(self._notify_waiters)
        self._track(future)

    def apply(self, effects: Sequence[Effect]) -> None:
        """Store effects that belong to no result."""
        if not effects:
            return

        def work(db: Connection) -> list[str]:
            for effect in effects:
                effect(db)
            return []

        self._track(self._write(work, self.locks))

    def check_fence(self, db: Connection) -> None:
        """Raise if this worker must not write: an earlier write failed, or it lost its lease.

        The engine continues while commits are pending. Nothing after a failed one may be stored: a
        gap in the changes of a model could never be repaired.
        """
        if self._has_failed:
            raise StoreUnavailable("an earlier write failed; the worker restarts")
        if not coordination.has_lease(db, self._lease, self._epoch):
            raise LeaseLost(f"another worker holds the lease {self._lease!r} now; this one ends")

    def _write(
        self, work: Callable[[Connection], list[str]], locks: WriteLocks
    ) -> Future[list[str]]:
        def guarded(db: Connection) -> list[str]:
            try:
                self.check_fence(db)
                return work(db)
            except BaseException as error:
                # Set here too, because the next write may share this transaction. A transaction
                # that conflicts with another one is repeated.
                self._has_failed = self._has_failed or not is_conflict(error)
                raise

        future = self._database.write_soon(guarded, locks)
        future.add_done_callback(self._record_failure)
        return future

    def _record_failure(self, future: Future[list[str]]) -> None:
        # Runs on the writer's thread, before the next group of writes.
        self._has_failed = self._has_failed or future.exception() is not None

    def _track(self, future: Future[list[str]]) -> None:
        self._pending.append(future)
        self.check()
        while len(self._pending) > MAX_PENDING_COMMITS:
            self._pending.popleft().result()

    def check(self) -> None:
        """Raise the error of a failed commit."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def flush(self) -> None:
        """Wait for all pending commits."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Close the socket."""
        self._wakeup_sender.close()

    def _notify_waiters(self, future: Future[list[str]]) -> None:
        if future.exception() is None:
            self._wakeup_sender.notify(future.result())


def split_by_samplers(
    entries: Sequence[ResultEntry], max_samplers: int
) -> Iterator[list[ResultEntry]]:
    """Split entries, in order, into parts of at most this many sampling sessions."""
    part: list[ResultEntry] = []
    sampler_ids: set[str] = set()
    for entry in entries:
        added = {entry.job.sampler_id} if entry.job.sampler_id is not None else set()
        if part and len(sampler_ids | added) > max_samplers:
            yield part
            part, sampler_ids = [], set()
        part.append(entry)
        sampler_ids |= added
    if part:
        yield part


def _store_results(db: Connection, entries: list[ResultEntry], now: float) -> list[str]:
    for entry in entries:
        # A job that was cancelled meanwhile stays cancelled.
        if jobs.finish(db, _job_ending(entry, now)):
            _apply_effects(db, entry, now)
    return [entry.job.id for entry in entries]


def _job_ending(entry: ResultEntry, now: float) -> jobs.JobEnding:
    outcome = entry.outcome
    if isinstance(outcome, Failed):
        return jobs.JobEnding(
            job=entry.job,
            error=outcome.message,
            category=outcome.category,
            applied=entry.applied,
            started_at=entry.started_at,
            finished_at=now,
        )
    return jobs.JobEnding(
        job=entry.job,
        result=outcome.result,
        applied=entry.applied,
        started_at=entry.started_at,
        finished_at=now,
    )


def _apply_effects(db: Connection, entry: ResultEntry, now: float) -> None:
    for effect in entry.outcome.effects:
        effect(db)
    if isinstance(entry.outcome, Failed):
        return
    job = entry.job
    step = StepRecord(
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


def set_run_state(run_id: str, state: RunState) -> Effect:
    """Return an effect that sets a model's state."""
    return lambda db: runs.set_state(db, run_id, state)


def count_usage(job: JobRecord, *, run_id: str, base_model: str, kind: str, amount: int) -> Effect:
    """Return an effect that adds to a tenant's usage."""

    def effect(db: Connection) -> None:
        if amount > 0:
            accounting.add_usage(
                db,
                tenant_id=job.tenant_id,
                session_id=job.session_id,
                run_id=run_id,
                base_model=base_model,
                kind=kind,
                amount=amount,
                now=clock.now(),
            )

    return effect


def insert_checkpoint(job: JobRecord, checkpoint: CheckpointRecord) -> tuple[Effect, ...]:
    """Return effects that store a checkpoint and replace the one with the same path."""

    def enter(db: Connection) -> None:
        before = checkpoints.find(db, checkpoint.path, checkpoint.created_at)
        if before is not None:
            checkpoints.delete(db, before.id, checkpoint.created_at)
        session = sessions.find(db, checkpoint.session_id)
        project_id = session.project_id if session is not None else checkpoint.project_id
        checkpoints.insert(db, replace(checkpoint, project_id=project_id))

    if checkpoint.is_ephemeral:
        return (enter,)
    counted = count_usage(
        job, run_id=checkpoint.run_id, base_model=checkpoint.base_model, kind="checkpoint", amount=1
    )
    return enter, counted, _audit_saved(job, checkpoint)


def _audit_saved(job: JobRecord, checkpoint: CheckpointRecord) -> Effect:
    entry = AuditRecord(
        tenant_id=job.tenant_id,
        at=checkpoint.created_at,
        event="checkpoint_saved",
        details={
            "checkpoint_id": checkpoint.path.checkpoint_id,
            "tinker_path": str(checkpoint.path),
            "request_id": job.id,
        },
        run_id=checkpoint.run_id,
        tinker_path=str(checkpoint.path),
    )
    return lambda db: accounting.insert_audit(db, entry)


def delete_surplus_unnamed(checkpoint: CheckpointRecord, num_kept: int) -> Effect:
    """Return an effect that deletes a model's oldest unnamed sampler weights."""

    def effect(db: Connection) -> None:
        checkpoints.delete_surplus_unnamed(db, checkpoint.run_id, num_kept, checkpoint.created_at)

    return effect


def insert_sampler(sampler_id: str, checkpoint: CheckpointRecord) -> Effect:
    """Return an effect that creates a sampling session for unnamed sampler weights."""
    sampler = SamplerRecord(
        id=sampler_id,
        tenant_id=checkpoint.tenant_id,
        session_id=checkpoint.session_id,
        base_model=checkpoint.base_model,
        model_path=None,
        checkpoint_id=checkpoint.id,
        created_at=checkpoint.created_at,
    )
    return lambda db: samplers.insert(db, sampler)
