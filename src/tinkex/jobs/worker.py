"""The one process that owns the engine: takes promises in their order and keeps them.

pull what arrived -> one turn of training -> one step of all samples -> wait for the bell

A turn of training is at most one micro-batch of a long pass, which goes on in a later turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tinkex import clock
from tinkex.engine.protocol import Engine
from tinkex.errors import RequestErrorCategory, StoreError, TinkexError
from tinkex.home import Home
from tinkex.jobs.active_samples import ActiveSamples
from tinkex.jobs.adapter_memory import AdapterMemory
from tinkex.jobs.fair_queue import BatchLimits, FairQueue
from tinkex.jobs.housekeeping import Housekeeper, HousekeepingPolicy
from tinkex.jobs.job_types import CANCELLED, PASS_KINDS, Failed, JobOutcome
from tinkex.jobs.lease import WorkerLease
from tinkex.jobs.operations import CUSTOM_LOSS_UNSUPPORTED, PassBatch, run_operation
from tinkex.jobs.queue import CANCEL_PREFIX
from tinkex.jobs.quotas import QuotaChecks
from tinkex.jobs.resident_models import ResidentModels
from tinkex.jobs.result_log import ResultEntry, ResultLog
from tinkex.jobs.scheduling import AdaptiveBatchSize
from tinkex.jobs.served_models import ServedModels
from tinkex.jobs.snapshots import SnapshotPolicy, SnapshotWriter
from tinkex.jobs.wakeup import WakeupListener
from tinkex.jobs.worker_context import ModelTask, WorkerContext
from tinkex.logs import get_logger
from tinkex.store import jobs, runs
from tinkex.store.database import Connection, Database
from tinkex.store.records import JobRecord

LOG = get_logger(__name__)
#: How often a worker that nobody rings looks by itself.
POLL_SECONDS = 0.5
#: Promises taken in at once.
MAX_FETCHED_JOBS = 1000
#: How often it does what is not urgent.
MAINTENANCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How a worker works."""

    batch_limits: BatchLimits = field(default_factory=BatchLimits)
    snapshots: SnapshotPolicy = field(default_factory=SnapshotPolicy)
    housekeeping: HousekeepingPolicy = field(default_factory=HousekeepingPolicy)
    max_attempts: int = 3
    """Work during which the worker died so often is given up."""
    quotas: QuotaChecks = field(default_factory=QuotaChecks)
    max_unnamed_weights: int = 3
    """How many unnamed sampler weights a model keeps: those that were used last."""
    owner: str = ""
    """Who starts this worker; the same owner's next worker takes over at once."""


class Worker:
    """Runs until it is told to stop."""

    def __init__(
        self,
        *,
        database: Database,
        engine: Engine,
        home: Home,
        config: WorkerConfig,
        refresh_models: Callable[[], bool] = lambda: False,
        models_source: str = "",
    ) -> None:
        self._config = config
        self._database = database
        self._served_models = ServedModels(engine, database, refresh_models, models_source)
        self._context = WorkerContext(
            engine,
            database,
            home,
            quotas=config.quotas,
            max_unnamed_weights=config.max_unnamed_weights,
        )
        self._lease = WorkerLease(database, config.owner)
        self._result_log = ResultLog(database, self._lease.epoch)
        self._listener = WakeupListener(database, "worker")
        self._fair_queue = FairQueue(config.batch_limits)
        self._resident_models = ResidentModels(self._context)
        self._snapshots = SnapshotWriter(
            self._context, config.snapshots, self._result_log.check_fence
        )
        self._adapter_memory = AdapterMemory(
            self._context, self._resident_models, self._snapshots, self._fair_queue.is_busy
        )
        self._active_samples = ActiveSamples(self._context)
        self._housekeeper = Housekeeper(self._context, config.housekeeping)
        self._batch_size = AdaptiveBatchSize()
        self._in_progress: dict[str, tuple[JobRecord, PassBatch, float]] = {}
        """Passes that have begun, by job id, and when they did."""
        self._next_seq: dict[str, int] = {}
        self._last_job_no = 0
        self._training_seconds = 0.0
        """How long the last turn of training took."""
        self._is_stopping = False
        self._next_maintenance_at = 0.0

    def stop(self) -> None:
        """Finish what is being done, then end; may be called from a signal handler."""
        self._is_stopping = True
        self._listener.wake()

    def heartbeat(self) -> None:
        """Say that this worker is alive; from another thread, for a turn may take minutes."""
        self._listener.heartbeat()

    def run(self) -> None:
        """Work until stopped; whatever is raised means: begin again from the store."""
        self._start_up()
        try:
            while not self._is_stopping:
                self._served_models.refresh()
                self._poll_queue()
                if not self._run_batch() and not self._is_stopping:
                    self._handle_messages(self._listener.wait(self._wait_seconds()))
                self._run_maintenance()
            self._shut_down()
        finally:
            self._housekeeper.close()
            self._snapshots.close()
            self._result_log.close()
            self._lease.release()
            self._listener.close()

    # --- beginning and ending ------------------------------------------------------------------
    def _start_up(self) -> None:
        def work(db: Connection) -> tuple[int, int]:
            self._served_models.publish(db)
            num_lost = jobs.fail_exhausted(
                db,
                max_attempts=self._config.max_attempts,
                reason=f"the server's worker died {self._config.max_attempts} times while doing "
                "this; it was given up",
                now=clock.now(),
            )
            return num_lost, jobs.requeue_running(db)

        num_lost, num_again = self._database.write(work)
        if num_lost or num_again:
            LOG.warning("work of a worker that died: %d again, %d given up", num_again, num_lost)
        self._snapshots.remove_orphans()
        self._housekeeper.start()

    def _shut_down(self) -> None:
        """Put back what is not done, and write every model's state."""
        waiting = [*self._active_samples.job_ids, *self._in_progress]
        for ticket in self._active_samples.job_ids:
            self._active_samples.cancel(ticket)
        for _, passes, _ in self._in_progress.values():
            passes.cancel()
        self._result_log.flush()
        self._database.write(lambda db: jobs.requeue_running(db, waiting))
        for resident in self._resident_models:
            self._snapshots.snapshot_and_wait(resident)

    # --- hearing of work -------------------------------------------------------------------------
    def _poll_queue(self) -> None:
        """Take in what arrived since the last look."""
        self._handle_messages(self._listener.messages())
        while True:
            try:
                if self._fetch_queued() < MAX_FETCHED_JOBS:
                    return
            except StoreError as error:
                LOG.warning("cannot look for work: %s", error)
                time.sleep(POLL_SECONDS)
                return

    def _fetch_queued(self) -> int:
        arrived = self._database.read(
            lambda db: jobs.list_queued_after(db, self._last_job_no, MAX_FETCHED_JOBS)
        )
        now = time.monotonic()
        for job in arrived:
            self._fair_queue.add(job, self._expected_seq(job), now)
            self._last_job_no = job.no
        return len(arrived)

    def _expected_seq(self, job: JobRecord) -> int:
        """The number that a model's work goes on with."""
        if job.run_id is None or self._fair_queue.has_lane(job.tenant_id, job.run_id):
            return 0
        run_id = job.run_id
        if run_id not in self._next_seq:
            run = self._database.read(lambda db: runs.find(db, run_id))
            self._next_seq[run_id] = run.next_seq if run is not None else 0
        return self._next_seq[run_id]

    def _handle_messages(self, messages: Sequence[str]) -> None:
        named = [word[1:] for word in messages if word.startswith(CANCEL_PREFIX)]
        if not named:
            return
        # Anybody can ring a bell; what is cancelled, the store alone knows. If it does not answer
        # now, the chores find out later.
        with suppress(StoreError):
            self._stop_jobs(self._database.read(lambda db: jobs.list_to_stop(db, named)))

    def _stop_jobs(self, job_ids: Sequence[str]) -> None:
        """Stop what is cancelled: samples and passes in progress now, waiting passes in turn."""
        self._fair_queue.cancel(job_ids)
        for job_id in job_ids:
            self._active_samples.cancel(job_id)
            stopped = self._in_progress.pop(job_id, None)
            if stopped is not None:
                job, passes, started_at = stopped
                passes.cancel()
                self._finish_jobs([ResultEntry(job, CANCELLED, None, started_at)])

    def _wait_seconds(self) -> float:
        if self._context.engine.num_samples:
            return 0.0
        next_look = self._fair_queue.next_poll_at()
        if next_look is None:
            return POLL_SECONDS
        return min(POLL_SECONDS, max(0.0, next_look - time.monotonic()))

    # --- working ---------------------------------------------------------------------------------
    def _run_batch(self) -> bool:
        """Do something of everything; False if there was nothing to do."""
        self._result_log.check()
        is_busy = self._start_samples()
        if self._context.engine.num_samples:
            # As long as the last training took, so that each has half of a busy engine. Before the
            # next training, so that a sample that arrived meanwhile does not wait for two.
            self._sample_until(time.monotonic() + self._training_seconds)
            is_busy = True
        started = time.monotonic()
        turn = self._fair_queue.next_batch(started, self._batch_size.max_operations)
        for portion in self._adapter_memory.split_by_memory(turn):
            self._run_training(portion)
        self._training_seconds = time.monotonic() - started if turn else 0.0
        return is_busy or bool(turn)

    def _sample_until(self, deadline: float) -> None:
        """Step all samples at least once, and take in new ones while there is time."""
        while True:
            over = [
                ResultEntry(job, outcome, None, at)
                for job, at, outcome in self._active_samples.step()
            ]
            for entry in over:
                self._fair_queue.finish_sample(entry.job, entry.outcome.num_tokens)
            self._log_results(over)
            is_over = time.monotonic() >= deadline or not self._context.engine.num_samples
            if is_over or self._is_stopping:
                return
            self._poll_queue()
            self._start_samples()

    def _start_samples(self) -> bool:
        engine = self._context.engine
        if self._active_samples.is_exclusive:
            return False
        num_free = engine.max_samples - engine.num_samples
        taken = self._fair_queue.next_samples(
            num_free, self._active_samples.running_jobs, engine.max_samples
        )
        if not taken:
            return False
        payloads = self._start_jobs(taken)
        refused = []
        for job in taken:
            # One that was cancelled meanwhile has no payload any more.
            payload = payloads.get(job.id)
            failed = self._active_samples.start(job, payload) if payload is not None else None
            if failed is not None:
                refused.append(ResultEntry(job, failed, None, clock.now()))
        self._log_results(refused)
        return True

    def _start_jobs(self, started: Sequence[JobRecord]) -> dict[str, bytes]:
        ids = [job.id for job in started]
        found = self._database.read(lambda db: jobs.get_payloads(db, ids))
        self._result_log.start(ids)
        return found

    def _run_training(self, batch: Sequence[JobRecord]) -> None:
        first = batch[0]
        begun = self._in_progress.pop(first.id, None)
        if begun is not None:
            _, passes, started_at = begun
            self._step_passes(batch, passes, started_at)
            return
        started_at = clock.now()
        found = self._start_jobs(batch)
        tasks: dict[str, ModelTask] = {}
        outcomes: dict[str, JobOutcome] = {}
        for job in batch:
            task = self._make_task(job, found.get(job.id))
            if isinstance(task, ModelTask):
                tasks[job.id] = task
            else:
                outcomes[job.id] = task
        if tasks and first.kind in PASS_KINDS:
            passes = PassBatch(self._context, list(tasks.values()))
            self._step_passes([task.job for task in tasks.values()], passes, started_at)
        else:
            outcomes |= {
                name: self._batch_size.run_timed(run_operation, self._context, task)
                for name, task in tasks.items()
            }
        over = [job for job in batch if job.id in outcomes]
        self._finish_jobs([self._make_entry(job, outcomes[job.id], started_at) for job in over])

    def _step_passes(
        self, batch: Sequence[JobRecord], passes: PassBatch, started_at: float
    ) -> None:
        """Compute a micro-batch; a single pass that has more of them goes on in a later turn."""
        outcomes = passes.step() if len(batch) == 1 else passes.finish()
        if outcomes is None:
            (job,) = batch
            self._in_progress[job.id] = (job, passes, started_at)
            self._fair_queue.suspend(job, passes.num_tokens)
            return
        done = zip(batch, outcomes, strict=True)
        self._finish_jobs([self._make_entry(job, outcome, started_at) for job, outcome in done])

    def _make_entry(self, job: JobRecord, outcome: JobOutcome, started_at: float) -> ResultEntry:
        return ResultEntry(job, outcome, self._count_change(job, outcome), started_at)

    def _finish_jobs(self, entries: Sequence[ResultEntry]) -> None:
        """Write outcomes down, and let the models go on."""
        self._log_results(entries)
        for entry in entries:
            self._fair_queue.finish(entry.job)
            self._advance_seq(entry.job)
        self._snapshot_changed(entries)

    def _make_task(self, job: JobRecord, payload: bytes | None) -> ModelTask | Failed:
        """The work with its model in memory, or why it cannot be done."""
        if job.run_id is None:
            return CUSTOM_LOSS_UNSUPPORTED
        if self._fair_queue.is_cancelled(job):
            return CANCELLED
        if payload is None:
            return Failed(message="the request is gone", category=RequestErrorCategory.Server)
        try:
            resident = self._resident_models.get(job.run_id)
        except StoreError:
            raise
        except TinkexError as error:
            return Failed(message=error.message, category=error.category)
        if job.position > 0 and not self._context.engine.has_adapter(job.run_id):
            return Failed(
                message=f"model {job.run_id} could not be made",
                category=RequestErrorCategory.User,
            )
        return ModelTask(job, resident.run, payload)

    def _count_change(self, job: JobRecord, outcome: JobOutcome) -> int | None:
        """The change's number, if it was one."""
        if not outcome.is_model_change or job.run_id is None:
            return None
        resident = self._resident_models.get(job.run_id)
        self._snapshots.record_change(resident, job.kind, job.payload_bytes)
        return resident.applied

    def _snapshot_changed(self, entries: Sequence[ResultEntry]) -> None:
        """Write models that have changed enough; after their changes were handed to the store."""
        for entry in entries:
            run_id = entry.job.run_id
            if run_id is None:
                continue
            if not self._context.engine.has_adapter(run_id):
                # It was unloaded, or could not be made.
                self._resident_models.drop(run_id)
            if entry.applied is not None:
                self._snapshots.snapshot_if_due(self._resident_models.get(run_id), entry.job.kind)

    def _advance_seq(self, job: JobRecord) -> None:
        if job.run_id is not None:
            following = max(self._next_seq.get(job.run_id, 0), job.position + 1)
            self._next_seq[job.run_id] = following

    def _log_results(self, entries: Sequence[ResultEntry]) -> None:
        if entries:
            self._result_log.finish(entries)

    # --- what is not urgent ----------------------------------------------------------------------
    def _run_maintenance(self) -> None:
        now = time.monotonic()
        if now < self._next_maintenance_at:
            return
        self._next_maintenance_at = now + MAINTENANCE_SECONDS
        self._lease.check()
        self._snapshots.snapshot_all_due(list(self._resident_models))
        try:
            self._stop_cancelled()
            self._adapter_memory.evict_idle()
        except StoreError as error:
            # Nothing was done that is not on record, so there is no need to begin again.
            LOG.warning("cannot look after the models now: %s", error)
        # With everything on disk the store knows the numbers, so they need not pile up here.
        self._result_log.flush()
        self._next_seq.clear()

    def _stop_cancelled(self) -> None:
        """Stop what is cancelled in the store, although no bell told so."""
        tickets = self._active_samples.job_ids
        self._stop_jobs(self._database.write(lambda db: jobs.list_to_stop(db, tickets)))
