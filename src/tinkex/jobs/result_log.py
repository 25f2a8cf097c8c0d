"""Writing outcomes down: in the order they happened, without keeping the engine waiting.

The engine goes on while a commit is under way; results are told only after it. If a commit fails,
the engine's memory is ahead of the store, so the worker must end and begin again from the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
from tinkex.store.records import (
    AuditRecord,
    CheckpointRecord,
    JobRecord,
    RunState,
    SamplerRecord,
    StepRecord,
)

#: Commits under way before the engine waits for one.
MAX_PENDING_COMMITS = 32


class LeaseLost(TinkexError):
    """Another worker serves this store."""


class ResultEntry(NamedTuple):
    """A promise and what came of it."""

    job: JobRecord
    outcome: JobOutcome
    applied: int | None
    started_at: float


class ResultLog:
    """The worker's side of the store."""

    def __init__(self, database: Database, epoch: int) -> None:
        self._database = database
        self._epoch = epoch
        self._wakeup_sender = WakeupSender(database, "api")
        self._pending: deque[Future[list[str]]] = deque()
        self._has_failed = False

    def start(self, job_ids: Sequence[str]) -> None:
        """Note that these are being done."""
        ids, now = list(job_ids), clock.now()
        self._track(self._write(lambda db: _mark_started(db, ids, now)))

    def finish(self, entries: Sequence[ResultEntry]) -> None:
        """Write outcomes down, and tell whoever waits once they are on disk."""
        written, now = list(entries), clock.now()
        future = self._write(lambda db: _store_results(db, written, now))
        future.add_done_callback(self._notify_waiters)
        self._track(future)

    def check_fence(self, db: Connection) -> None:
        """Raise if this worker may not write: a write failed before, or another has taken over.

        The engine goes on while commits are under way. What it did after the one that failed must
        not be written: a hole in what changed a model could never be repaired.
        """
        if self._has_failed:
            raise StoreUnavailable("a write before this one failed; the worker begins again")
        if not coordination.has_lease(db, "worker", self._epoch):
            raise LeaseLost("another worker serves this store now; this one ends")

    def _write(self, work: Callable[[Connection], list[str]]) -> Future[list[str]]:
        def guarded(db: Connection) -> list[str]:
            is_written = False
            try:
                self.check_fence(db)
                told = work(db)
                is_written = True
            finally:
                # Told here too: the next write may share the transaction of this one.
                self._has_failed = self._has_failed or not is_written
            return told

        future = self._database.write_soon(guarded)
        future.add_done_callback(self._record_failure)
        return future

    def _record_failure(self, future: Future[list[str]]) -> None:
        # On the writer's thread, before it begins with what comes after.
        self._has_failed = self._has_failed or future.exception() is not None

    def _track(self, future: Future[list[str]]) -> None:
        self._pending.append(future)
        self.check()
        while len(self._pending) > MAX_PENDING_COMMITS:
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
        self._wakeup_sender.close()

    def _notify_waiters(self, future: Future[list[str]]) -> None:
        if future.exception() is None:
            self._wakeup_sender.notify(future.result())


def _mark_started(db: Connection, ids: list[str], now: float) -> list[str]:
    jobs.mark_started(db, ids, now)
    return []


def _store_results(db: Connection, entries: list[ResultEntry], now: float) -> list[str]:
    for entry in entries:
        # What was cancelled meanwhile is over already, and stays so.
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
    """Move a model on in its life."""
    return lambda db: runs.set_state(db, run_id, state)


def count_usage(job: JobRecord, *, run_id: str, base_model: str, kind: str, amount: int) -> Effect:
    """Add to what a tenant has used."""

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
    """Make saved weights known, in place of those that had the same address."""

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
    """Delete the model's older unnamed sampler weights, so that they do not pile up."""

    def effect(db: Connection) -> None:
        checkpoints.delete_surplus_unnamed(db, checkpoint.run_id, num_kept, checkpoint.created_at)

    return effect


def insert_sampler(sampler_id: str, checkpoint: CheckpointRecord) -> Effect:
    """Open a sampling session on weights that are saved for it alone."""
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
