"""The worker: a process that owns an engine. It runs the jobs of one group of a store.

poll the queue -> start and step samples -> run one training batch -> wait for a wake-up

A batch is at most one micro-batch of a long pass, which continues in a later batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from tinkex import clock
from tinkex.checkpoint.blob_cache import BlobCache
from tinkex.checkpoint.storage import FileStorage
from tinkex.engine.protocol import Engine, EngineLost
from tinkex.errors import StoreError
from tinkex.home import Home
from tinkex.jobs.active_samples import ActiveSamples
from tinkex.jobs.coordinator import MOVED_MESSAGE, GroupCoordinator
from tinkex.jobs.drift import DriftMonitor
from tinkex.jobs.fair_queue import FairQueue
from tinkex.jobs.group_member import GroupMember
from tinkex.jobs.housekeeping import Housekeeper
from tinkex.jobs.lease import CoordinatorLease, WorkerLease
from tinkex.jobs.queue import CANCEL_PREFIX, NUMBER_PREFIX
from tinkex.jobs.queue_poller import POLL_SECONDS, QueuePoller
from tinkex.jobs.resident_models import ResidentModels
from tinkex.jobs.result_log import ResultEntry, ResultLog
from tinkex.jobs.snapshots import AdapterMemory, SnapshotWriter
from tinkex.jobs.token_stream_server import TokenStreamServer
from tinkex.jobs.tokenizer_blobs import TokenizerPublisher
from tinkex.jobs.training_batches import TrainingBatches
from tinkex.jobs.wakeup import WakeupListener
from tinkex.jobs.work_exchange import WorkExchange
from tinkex.jobs.worker_config import WorkerConfig
from tinkex.jobs.worker_context import WorkerContext
from tinkex.logs import get_logger
from tinkex.store import jobs
from tinkex.store.coordination import group_lease
from tinkex.store.database import Connection, Database
from tinkex.store.records import JobRecord
from tinkex.store.settings import get_or_create_secret
from tinkex.store.write_locks import SHARED, lease_locks

LOG = get_logger(__name__)
#: Interval of the maintenance.
MAINTENANCE_SECONDS = 5.0


class Worker:
    """Runs jobs until `stop` is called."""

    def __init__(
        self,
        *,
        database: Database,
        engine: Engine,
        home: Home,
        config: WorkerConfig,
        blobs: BlobCache | None = None,
        refresh_models: Callable[[], bool] = lambda: False,
        models_source: str = "",
    ) -> None:
        self._config = config
        self._database = database
        self._group_id = config.group_id
        secret = database.write(get_or_create_secret, SHARED)
        self._streams = TokenStreamServer(secret, config.stream_host)
        self._listener = WakeupListener(database, "worker", stream_address=self._streams.address)
        self._context = self._make_context(engine, home, blobs)
        self._lease = WorkerLease(database, group_lease(config.group_id), config.owner)
        self._result_log = ResultLog(
            database, self._lease.epoch, lease=self._lease.name, group_id=config.group_id
        )
        self._member = self._make_member(refresh_models, models_source)
        self._fair_queue = FairQueue(config.batch_limits)
        self._poller = QueuePoller(
            database, config.group_id, self._fair_queue, self._context.storage
        )
        self._resident_models = ResidentModels(self._context)
        self._snapshots = SnapshotWriter(
            self._context, config.snapshots, self._result_log.check_fence
        )
        self._adapter_memory = AdapterMemory(
            self._context, self._resident_models, self._snapshots, self._fair_queue.is_busy
        )
        self._exchange = self._make_exchange()
        self._drift = DriftMonitor(database, self._member)
        self._active_samples = ActiveSamples(self._context, self._streams, self._drift.observe)
        self._training = self._make_training()
        self._coordinator = self._make_coordinator()
        self._housekeeper = self._make_housekeeper()
        self._training_seconds = 0.0
        """Duration of the last training batch."""
        self._is_stopping = False
        self.is_draining = False
        """Whether the group is or was drained, which ends the worker."""
        self._next_maintenance_at = 0.0

    def _make_context(self, engine: Engine, home: Home, blobs: BlobCache | None) -> WorkerContext:
        return WorkerContext(
            engine,
            self._database,
            FileStorage(home, blobs, wake=self._listener.wake),
            quotas=self._config.quotas,
            max_unnamed_weights=self._config.max_unnamed_weights,
            locks=lease_locks(group_lease(self._group_id)),
        )

    def _make_training(self) -> TrainingBatches:
        return TrainingBatches(
            self._context,
            self._fair_queue,
            self._resident_models,
            self._adapter_memory,
            start_jobs=self._start_jobs,
            store_results=self._store_results,
            wake=self._listener.wake,
        )

    def _make_member(self, refresh_models: Callable[[], bool], models_source: str) -> GroupMember:
        return GroupMember(
            self._context.engine,
            self._database,
            refresh_models,
            group_id=self._group_id,
            source=models_source,
            check_fence=self._result_log.check_fence,
            tokenizers=TokenizerPublisher(self._context.storage),
        )

    def _make_exchange(self) -> WorkExchange:
        return WorkExchange(
            self._member,
            self._fair_queue,
            self._resident_models,
            self._adapter_memory,
            self._result_log,
        )

    def _make_coordinator(self) -> GroupCoordinator:
        return GroupCoordinator(
            self._database,
            move_after_seconds=self._config.move_after_seconds,
            max_attempts=self._config.max_attempts,
        )

    def _make_housekeeper(self) -> Housekeeper:
        return Housekeeper(
            self._context,
            self._config.housekeeping,
            lease=CoordinatorLease(self._database, self._listener.process.id),
            coordinate=self._coordinator.run_once,
        )

    def stop(self) -> None:
        """Stop after the current batch; may be called from a signal handler."""
        self._is_stopping = True
        self._listener.wake()

    def register(self) -> None:
        """Store the group with its base models, which `run` does too."""
        self._database.write(self._member.register)

    def heartbeat(self) -> None:
        """Send a heartbeat; called from another thread, because a batch may take minutes."""
        self._listener.heartbeat()
        self._member.touch()

    def run(self) -> None:
        """Run until stopped; after any exception the worker must restart from the store."""
        self._start_up()
        try:
            while not self._is_stopping:
                self._member.refresh_models()
                self._poll_queue()
                if not self._run_timed_batch() and not self._is_stopping:
                    self._wait_for_work()
                self._exchange_work()
                self._run_maintenance()
            self._shut_down()
        except EngineLost:
            if not self._member.can_train:
                # The restart takes minutes, and there are no models that must wait for it.
                self._result_log.flush()
                self._member.abandon_samples(self._config.max_attempts)
            raise
        finally:
            self._housekeeper.close()
            self._coordinator.close()
            self._training.close()
            self._context.storage.close()
            self._snapshots.close()
            self._result_log.close()
            self._drift.close()
            self._member.close()
            self._lease.release()
            self._listener.close()
            self._streams.close()

    # --- start and stop ------------------------------------------------------------------------
    def _start_up(self) -> None:
        def work(db: Connection) -> tuple[int, int]:
            self._result_log.check_fence(db)
            self._member.register(db)
            num_lost = jobs.fail_exhausted(
                db, self._group_id, max_attempts=self._config.max_attempts, now=clock.now()
            )
            return num_lost, jobs.requeue_running(db, group_id=self._group_id)

        num_lost, num_requeued = self._database.write(work)
        if num_lost or num_requeued:
            LOG.warning("jobs of a crashed worker: %d requeued, %d failed", num_requeued, num_lost)
        if not self._member.has_peers:
            # Directories without a row may belong to other workers; they are removed when old.
            self._snapshots.remove_orphans()
        self._housekeeper.start()

    def _shut_down(self) -> None:
        """Requeue unfinished jobs and write a snapshot of every model."""
        waiting = [*self._active_samples.job_ids, *self._training.interrupt()]
        for job_id in self._active_samples.job_ids:
            self._active_samples.cancel(job_id)
        self._result_log.flush()
        self._database.write(partial(self._requeue, job_ids=waiting), self._context.locks)
        for resident in self._resident_models:
            self._snapshots.snapshot_and_wait(resident)
        if self.is_draining:
            self._member.hand_over()

    def _requeue(self, db: Connection, job_ids: Sequence[str]) -> None:
        self._result_log.check_fence(db)
        jobs.requeue_running(db, job_ids, group_id=self._group_id)

    # --- polling ---------------------------------------------------------------------------------
    def _poll_queue(self) -> None:
        """Fetch new jobs and handle messages."""
        self._handle_messages(self._listener.messages())
        self._poller.fetch()

    def _fetch_all_queued(self) -> None:
        """Fetch also the jobs that other groups have given to this one."""
        # After the flush no started job is queued, and the store has the sequence numbers.
        self._result_log.flush()
        self._poller.forget_seqs()
        self._poller.fetch_all()

    def _wait_for_work(self) -> None:
        """Take samples of a busy group, or wait for a wake-up message."""
        if self._member.has_peers and self._member.steal_samples():
            self._fetch_all_queued()
            return
        self._handle_messages(self._listener.wait(self._wait_seconds()))

    def _handle_messages(self, messages: Sequence[str]) -> None:
        if MOVED_MESSAGE in messages:
            self._exchange.expedite()
        for word in messages:
            if word.startswith(NUMBER_PREFIX) and word[1:].isdecimal():
                self._poller.announce(int(word[1:]))
        cancelled = [word[1:] for word in messages if word.startswith(CANCEL_PREFIX)]
        if not cancelled:
            return
        # Messages are not authenticated, so the store decides. If it fails, maintenance retries.
        with suppress(StoreError):
            self._stop_jobs(self._database.read(lambda db: jobs.list_to_stop(db, cancelled)))

    def _stop_jobs(self, job_ids: Sequence[str]) -> None:
        """Stop cancelled jobs: running ones now, waiting passes when they are next."""
        self._fair_queue.cancel(job_ids)
        for job_id in job_ids:
            self._result_log.apply(self._active_samples.cancel(job_id))
            self._training.cancel(job_id)

    def _wait_seconds(self) -> float:
        if self._context.engine.num_samples:
            return 0.0
        times = (self._fair_queue.next_poll_at(), self._active_samples.next_retry_at())
        now = time.monotonic()
        return min([POLL_SECONDS, *(max(0.0, at - now) for at in times if at is not None)])

    # --- running jobs ----------------------------------------------------------------------------
    def _run_timed_batch(self) -> bool:
        started = time.monotonic()
        is_busy = self._run_batch()
        if is_busy:
            self._exchange.throughput.add(0, time.monotonic() - started)
        return is_busy

    def _run_batch(self) -> bool:
        """Run samples and one training batch; returns False if there was nothing to do."""
        self._result_log.check()
        self._training.finish_saves()
        is_busy = self._start_samples()
        if self._context.engine.num_samples:
            # As long as the last training batch took, so that each gets half of a busy engine.
            # Before the next batch, so that a new sample never waits for two batches.
            self._sample_until(time.monotonic() + self._training_seconds)
            is_busy = True
        started = time.monotonic()
        batch = self._fair_queue.next_batch(started, self._training.max_operations)
        for portion in self._adapter_memory.split_by_memory(batch):
            self._training.run(portion)
        self._training_seconds = time.monotonic() - started if batch else 0.0
        return is_busy or bool(batch)

    def _sample_until(self, deadline: float) -> None:
        """Step all samples at least once, and start new ones until the deadline."""
        while True:
            finished = [
                ResultEntry(job, outcome, None, at)
                for job, at, outcome in self._active_samples.step()
            ]
            for entry in finished:
                self._fair_queue.finish_sample(entry.job, entry.outcome.num_tokens)
            self._store_results(finished)
            declined = self._active_samples.take_declined()
            self._store_results(self._exchange.pass_on(declined) if declined else [])
            is_over = time.monotonic() >= deadline or not self._context.engine.num_samples
            if is_over or self._is_stopping:
                return
            self._poll_queue()
            self._start_samples()

    def _start_samples(self) -> bool:
        engine = self._context.engine
        self._store_results(self._active_samples.retry_waiting())
        if not self._active_samples.can_start:
            return False
        num_free = engine.max_samples - engine.num_samples
        taken = self._fair_queue.next_samples(
            num_free, self._active_samples.running_jobs, engine.max_samples
        )
        if not taken:
            return False
        payloads = self._start_jobs(taken)
        # A job that was cancelled meanwhile has no payload.
        present = [job for job in taken if payloads.get(job.id) is not None]
        self._store_results(self._active_samples.start_all(present, payloads))
        return True

    def _start_jobs(self, started: Sequence[JobRecord]) -> dict[str, bytes]:
        ids = [job.id for job in started]
        payloads = self._database.read(
            lambda db: jobs.get_payloads(db, ids, group_id=self._group_id)
        )
        self._result_log.start(ids)
        return payloads

    def _store_results(self, entries: Sequence[ResultEntry]) -> None:
        if not entries:
            return
        self._result_log.finish(entries)
        for entry in entries:
            self._poller.advance_seq(entry.job)
        self._exchange.throughput.add(sum(entry.outcome.num_tokens for entry in entries), 0.0)

    # --- maintenance -----------------------------------------------------------------------------
    def _exchange_work(self) -> None:
        """Exchange work with other groups; stops this worker if its group is to be drained."""
        if not self._exchange.is_due():
            return
        self._drift.collect()
        try:
            news = self._exchange.run()
        except StoreError as error:
            LOG.warning("cannot report the load, will retry: %s", error)
            return
        if news.is_draining:
            self.is_draining = self._is_stopping = True
        if news.has_new_work:
            self._fetch_all_queued()

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
            # Everything done so far is stored, so the worker need not restart.
            LOG.warning("maintenance failed, will retry: %s", error)
        # After the flush the store has the sequence numbers, so the cache can be dropped.
        self._result_log.flush()
        self._poller.forget_seqs()
        self._poller.fetch_all_if_due()

    def _stop_cancelled(self) -> None:
        """Stop cancelled samples whose wake-up message was lost."""
        job_ids = self._active_samples.job_ids
        self._stop_jobs(self._database.write(lambda db: jobs.list_to_stop(db, job_ids), SHARED))
