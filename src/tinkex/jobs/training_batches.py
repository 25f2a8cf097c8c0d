"""Batches of training operations: passes that share micro-batches, and other operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from tinkex import clock
from tinkex.checkpoint.places import BlobsUnavailable, retry_seconds
from tinkex.errors import RequestErrorCategory, TinkexError
from tinkex.jobs.fair_queue import AdaptiveBatchSize, FairQueue
from tinkex.jobs.job_types import CANCELLED, PASS_KINDS, WORKER_ERRORS, Failed, JobOutcome
from tinkex.jobs.operations import PassBatch, create_custom_loss, run_operation
from tinkex.jobs.pending_saves import PendingSaves
from tinkex.jobs.resident_models import ResidentModels
from tinkex.jobs.result_log import ResultEntry
from tinkex.jobs.snapshots import AdapterMemory
from tinkex.jobs.worker_context import ModelTask, WorkerContext
from tinkex.logs import get_logger
from tinkex.store.records import JobRecord

LOG = get_logger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class TrainingBatches:
    """Runs batches of the queue; a long pass is suspended after each micro-batch."""

    def __init__(
        self,
        context: WorkerContext,
        fair_queue: FairQueue,
        resident_models: ResidentModels,
        adapter_memory: AdapterMemory,
        *,
        start_jobs: Callable[[Sequence[JobRecord]], dict[str, bytes]],
        store_results: Callable[[Sequence[ResultEntry]], None],
        wake: Callable[[], None],
    ) -> None:
        """`start_jobs` marks jobs as started and returns their payloads by id.

        `wake` is called on another thread when there is something to do.
        """
        self._context = context
        self._fair_queue = fair_queue
        self._resident_models = resident_models
        self._adapter_memory = adapter_memory
        self._start_jobs = start_jobs
        self._store_results = store_results
        self._batch_size = AdaptiveBatchSize()
        self._saves = PendingSaves(wake)
        self._in_progress: dict[str, tuple[JobRecord, PassBatch, float]] = {}
        """Started passes by job id, with their start time."""

    @property
    def max_operations(self) -> int:
        """Number of operations allowed in the next batch."""
        return self._batch_size.max_operations

    def cancel(self, job_id: str) -> None:
        """Stop a suspended pass, which fails as cancelled."""
        stopped = self._in_progress.pop(job_id, None)
        if stopped is not None:
            job, passes, started_at = stopped
            passes.cancel()
            self._finish_jobs([ResultEntry(job, CANCELLED, None, started_at)])

    def interrupt(self) -> list[str]:
        """Drop all started jobs; returns their ids, which run again later."""
        for _, passes, _ in self._in_progress.values():
            passes.cancel()
        return [*self._in_progress, *self._saves.job_ids, *self._fair_queue.deferred_ids]

    def run(self, batch: Sequence[JobRecord]) -> None:
        """Run a batch, or the next micro-batch of a suspended pass."""
        first = batch[0]
        in_progress = self._in_progress.pop(first.id, None)
        if in_progress is not None:
            _, passes, started_at = in_progress
            self._step_passes(batch, passes, started_at)
            return
        started_at = clock.now()
        payloads = self._start_jobs(batch)
        tasks: dict[str, ModelTask] = {}
        outcomes: dict[str, JobOutcome] = {}
        for job in batch:
            task = self._unless_unavailable(job, self._make_task, job, payloads.get(job.id))
            if isinstance(task, ModelTask):
                tasks[job.id] = task
            elif task is not None:
                outcomes[job.id] = task
        if tasks and first.kind in PASS_KINDS:
            passes = PassBatch(self._context, list(tasks.values()))
            self._step_passes([task.job for task in tasks.values()], passes, started_at)
        else:
            for job_id, task in tasks.items():
                outcome = self._unless_unavailable(task.job, self._run_operation, task)
                if outcome is not None:
                    outcomes[job_id] = outcome
        entries = [
            self._make_entry(job, outcomes[job.id], started_at)
            for job in batch
            if job.id in outcomes
        ]
        self._finish_jobs([entry for entry in entries if not self._starts_upload(entry)])

    def _run_operation(self, task: ModelTask) -> JobOutcome:
        return self._batch_size.run_timed(run_operation, self._context, task)

    def _unless_unavailable(
        self, job: JobRecord, function: Callable[P, T], *args: P.args, **options: P.kwargs
    ) -> T | None:
        """Call a function; if the object store is away, defer the job and return None."""
        try:
            return function(*args, **options)
        except BlobsUnavailable as error:
            self._fair_queue.defer(job, time.monotonic() + retry_seconds(error))
            LOG.debug("deferred %s: %s", job.id, error)
            return None

    def _starts_upload(self, entry: ResultEntry) -> bool:
        """Start the upload of a save; returns False if the job has none."""
        outcome = entry.outcome
        if isinstance(outcome, Failed) or outcome.upload is None:
            return False
        self._saves.start(entry, outcome.upload)
        return True

    def finish_saves(self) -> None:
        """Store the outcomes of saves whose files are uploaded."""
        finished = self._saves.pop_finished()
        if finished:
            self._finish_jobs(finished)

    def close(self) -> None:
        """Stop waiting for uploads."""
        self._saves.close()

    def _step_passes(
        self, batch: Sequence[JobRecord], passes: PassBatch, started_at: float
    ) -> None:
        """Compute a micro-batch; a single longer pass continues in a later batch."""
        outcomes = passes.step() if len(batch) == 1 else passes.finish()
        if outcomes is None:
            (job,) = batch
            self._in_progress[job.id] = (job, passes, started_at)
            self._fair_queue.suspend(job, passes.num_tokens)
            return
        done = zip(batch, outcomes, strict=True)
        self._finish_jobs([self._make_entry(job, outcome, started_at) for job, outcome in done])

    def _make_entry(self, job: JobRecord, outcome: JobOutcome, started_at: float) -> ResultEntry:
        return ResultEntry(
            job, outcome, self._adapter_memory.count_change(job, outcome), started_at
        )

    def _finish_jobs(self, entries: Sequence[ResultEntry]) -> None:
        """Store outcomes and unblock the models' next jobs."""
        self._store_results(entries)
        for entry in entries:
            self._fair_queue.finish(entry.job)
        self._adapter_memory.snapshot_changed(entries)

    def _make_task(self, job: JobRecord, payload: bytes | None) -> ModelTask | JobOutcome:
        """Return the task with its model in memory, or the outcome of a job without one."""
        if self._fair_queue.is_cancelled(job):
            return CANCELLED
        if payload is None:
            return Failed(
                message="the payload of the request is missing",
                category=RequestErrorCategory.Server,
            )
        try:
            if job.run_id is None:
                if job.payload_ref is not None:
                    payload = self._context.storage.read_payload(job.payload_ref)
                return create_custom_loss(payload)
            resident = self._resident_models.get(job.run_id)
            if job.payload_ref is not None:
                # Last: a payload that was read in the background is given out only once.
                payload = self._context.storage.read_payload(job.payload_ref)
        except (*WORKER_ERRORS, BlobsUnavailable):
            raise
        except TinkexError as error:
            return Failed(message=error.message, category=error.category)
        if job.position > 0 and not self._context.engine.has_adapter(job.run_id):
            return Failed(
                message=f"model {job.run_id} could not be created",
                category=RequestErrorCategory.User,
            )
        return ModelTask(job, resident.run, payload)
