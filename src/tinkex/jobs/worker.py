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
from tinkex.jobs.adapter_memory import AdapterMemory
from tinkex.jobs.backlog import Backlog, TurnLimits
from tinkex.jobs.bells import Bell
from tinkex.jobs.bench import Bench, Task
from tinkex.jobs.housekeeping import Housekeeper, HousekeepingPolicy
from tinkex.jobs.kinds import PASSES
from tinkex.jobs.leasing import Lease
from tinkex.jobs.ledger import Entry, Ledger
from tinkex.jobs.operations import NO_CUSTOM_LOSS, PassTurn, run_operation
from tinkex.jobs.outcomes import CANCELLED, Failed, Outcome
from tinkex.jobs.pace import Pace
from tinkex.jobs.queue import CANCEL_MARK
from tinkex.jobs.quotas import QuotaChecks
from tinkex.jobs.recovery import Residents
from tinkex.jobs.sampling import Samples
from tinkex.jobs.serving import ServedModels
from tinkex.jobs.snapshots import SnapshotPolicy, Snapshots
from tinkex.logs import get_logger
from tinkex.store import jobs, runs
from tinkex.store.database import Connection, Database
from tinkex.store.records import Job

LOG = get_logger(__name__)
#: How often a worker that nobody rings looks by itself.
LOOK_SECONDS = 0.5
#: Promises taken in at once.
MAX_PULLED = 1000
#: How often it does what is not urgent.
CHORE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How a worker works."""

    turns: TurnLimits = field(default_factory=TurnLimits)
    snapshots: SnapshotPolicy = field(default_factory=SnapshotPolicy)
    housekeeping: HousekeepingPolicy = field(default_factory=HousekeepingPolicy)
    max_attempts: int = 3
    """Work during which the worker died so often is given up."""
    quotas: QuotaChecks = field(default_factory=QuotaChecks)
    kept_unnamed: int = 3
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
        self._served = ServedModels(engine, database, refresh_models, models_source)
        self._bench = Bench(
            engine, database, home, quotas=config.quotas, kept_unnamed=config.kept_unnamed
        )
        self._lease = Lease(database, config.owner)
        self._ledger = Ledger(database, self._lease.epoch)
        self._bell = Bell(database, "worker")
        self._backlog = Backlog(config.turns)
        self._residents = Residents(self._bench)
        self._snapshots = Snapshots(self._bench, config.snapshots, self._ledger.guard)
        self._memory = AdapterMemory(
            self._bench, self._residents, self._snapshots, self._backlog.is_busy
        )
        self._samples = Samples(self._bench)
        self._housekeeper = Housekeeper(self._bench, config.housekeeping)
        self._pace = Pace()
        self._in_progress: dict[str, tuple[Job, PassTurn, float]] = {}
        """Passes that have begun, by job id, and when they did."""
        self._next_seq: dict[str, int] = {}
        self._last_no = 0
        self._training_seconds = 0.0
        """How long the last turn of training took."""
        self._is_stopping = False
        self._chores_at = 0.0

    def stop(self) -> None:
        """Finish what is being done, then end; may be called from a signal handler."""
        self._is_stopping = True
        self._bell.ring_self()

    def stay(self) -> None:
        """Say that this worker is alive; from another thread, for a turn may take minutes."""
        self._bell.stay()

    def run(self) -> None:
        """Work until stopped; whatever is raised means: begin again from the store."""
        self._begin()
        try:
            while not self._is_stopping:
                self._served.follow()
                self._pull()
                if not self._turn() and not self._is_stopping:
                    self._hear(self._bell.wait(self._patience()))
                self._do_chores()
            self._end()
        finally:
            self._housekeeper.close()
            self._snapshots.close()
            self._ledger.close()
            self._lease.release()
            self._bell.close()

    # --- beginning and ending ------------------------------------------------------------------
    def _begin(self) -> None:
        def work(db: Connection) -> tuple[int, int]:
            self._served.publish(db)
            num_lost = jobs.give_up(
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
        self._snapshots.clean()
        self._housekeeper.open()

    def _end(self) -> None:
        """Put back what is not done, and write every model's state."""
        waiting = [*self._samples.tickets, *self._in_progress]
        for ticket in self._samples.tickets:
            self._samples.cancel(ticket)
        for _, passes, _ in self._in_progress.values():
            passes.cancel()
        self._ledger.flush()
        self._database.write(lambda db: jobs.requeue_running(db, waiting))
        for resident in self._residents:
            self._snapshots.take_now(resident)

    # --- hearing of work -------------------------------------------------------------------------
    def _pull(self) -> None:
        """Take in what arrived since the last look."""
        self._hear(self._bell.words())
        while True:
            try:
                if self._take_in() < MAX_PULLED:
                    return
            except StoreError as error:
                LOG.warning("cannot look for work: %s", error)
                time.sleep(LOOK_SECONDS)
                return

    def _take_in(self) -> int:
        arrived = self._database.read(lambda db: jobs.queued_after(db, self._last_no, MAX_PULLED))
        now = time.monotonic()
        for job in arrived:
            self._backlog.add(job, self._where(job), now)
            self._last_no = job.no
        return len(arrived)

    def _where(self, job: Job) -> int:
        """The number that a model's work goes on with."""
        if job.run_id is None or self._backlog.knows_lane(job.tenant_id, job.run_id):
            return 0
        run_id = job.run_id
        if run_id not in self._next_seq:
            run = self._database.read(lambda db: runs.find(db, run_id))
            self._next_seq[run_id] = run.next_seq if run is not None else 0
        return self._next_seq[run_id]

    def _hear(self, words: Sequence[str]) -> None:
        named = [word[1:] for word in words if word.startswith(CANCEL_MARK)]
        if not named:
            return
        # Anybody can ring a bell; what is cancelled, the store alone knows. If it does not answer
        # now, the chores find out later.
        with suppress(StoreError):
            self._cancel(self._database.read(lambda db: jobs.to_stop(db, named)))

    def _cancel(self, cancelled: Sequence[str]) -> None:
        """Stop what is cancelled: samples and passes in progress now, waiting passes in turn."""
        self._backlog.cancel(cancelled)
        for job_id in cancelled:
            self._samples.cancel(job_id)
            stopped = self._in_progress.pop(job_id, None)
            if stopped is not None:
                job, passes, started_at = stopped
                passes.cancel()
                self._finish([Entry(job, CANCELLED, None, started_at)])

    def _patience(self) -> float:
        if self._bench.engine.num_samples:
            return 0.0
        next_look = self._backlog.next_look()
        if next_look is None:
            return LOOK_SECONDS
        return min(LOOK_SECONDS, max(0.0, next_look - time.monotonic()))

    # --- working ---------------------------------------------------------------------------------
    def _turn(self) -> bool:
        """Do something of everything; False if there was nothing to do."""
        self._ledger.check()
        is_busy = self._start_samples()
        if self._bench.engine.num_samples:
            # As long as the last training took, so that each has half of a busy engine. Before the
            # next training, so that a sample that arrived meanwhile does not wait for two.
            self._sample_until(time.monotonic() + self._training_seconds)
            is_busy = True
        started = time.monotonic()
        turn = self._backlog.take_turn(started, self._pace.max_operations)
        for portion in self._memory.portions(turn):
            self._train(portion)
        self._training_seconds = time.monotonic() - started if turn else 0.0
        return is_busy or bool(turn)

    def _sample_until(self, deadline: float) -> None:
        """Step all samples at least once, and take in new ones while there is time."""
        while True:
            over = [Entry(job, outcome, None, at) for job, at, outcome in self._samples.step()]
            for entry in over:
                self._backlog.finish_sample(entry.job, entry.outcome.num_tokens)
            self._write_down(over)
            is_over = time.monotonic() >= deadline or not self._bench.engine.num_samples
            if is_over or self._is_stopping:
                return
            self._pull()
            self._start_samples()

    def _start_samples(self) -> bool:
        engine = self._bench.engine
        if self._samples.is_alone:
            return False
        num_free = engine.max_samples - engine.num_samples
        taken = self._backlog.take_samples(num_free, self._samples.running, engine.max_samples)
        if not taken:
            return False
        payloads = self._take(taken)
        refused = []
        for job in taken:
            # One that was cancelled meanwhile has no payload any more.
            payload = payloads.get(job.id)
            failed = self._samples.start(job, payload) if payload is not None else None
            if failed is not None:
                refused.append(Entry(job, failed, None, clock.now()))
        self._write_down(refused)
        return True

    def _take(self, taken: Sequence[Job]) -> dict[str, bytes]:
        ids = [job.id for job in taken]
        found = self._database.read(lambda db: jobs.payloads(db, ids))
        self._ledger.start(ids)
        return found

    def _train(self, turn: Sequence[Job]) -> None:
        first = turn[0]
        begun = self._in_progress.pop(first.id, None)
        if begun is not None:
            _, passes, started_at = begun
            self._step(turn, passes, started_at)
            return
        started_at = clock.now()
        found = self._take(turn)
        tasks: dict[str, Task] = {}
        outcomes: dict[str, Outcome] = {}
        for job in turn:
            task = self._task(job, found.get(job.id))
            if isinstance(task, Task):
                tasks[job.id] = task
            else:
                outcomes[job.id] = task
        if tasks and first.kind in PASSES:
            passes = PassTurn(self._bench, list(tasks.values()))
            self._step([task.job for task in tasks.values()], passes, started_at)
        else:
            outcomes |= {
                name: self._pace.timed(run_operation, self._bench, task)
                for name, task in tasks.items()
            }
        over = [job for job in turn if job.id in outcomes]
        self._finish([self._entry(job, outcomes[job.id], started_at) for job in over])

    def _step(self, turn: Sequence[Job], passes: PassTurn, started_at: float) -> None:
        """Compute a micro-batch; a single pass that has more of them goes on in a later turn."""
        outcomes = passes.step() if len(turn) == 1 else passes.finish()
        if outcomes is None:
            (job,) = turn
            self._in_progress[job.id] = (job, passes, started_at)
            self._backlog.suspend(job, passes.num_tokens)
            return
        done = zip(turn, outcomes, strict=True)
        self._finish([self._entry(job, outcome, started_at) for job, outcome in done])

    def _entry(self, job: Job, outcome: Outcome, started_at: float) -> Entry:
        return Entry(job, outcome, self._count_change(job, outcome), started_at)

    def _finish(self, entries: Sequence[Entry]) -> None:
        """Write outcomes down, and let the models go on."""
        self._write_down(entries)
        for entry in entries:
            self._backlog.finish(entry.job)
            self._advance(entry.job)
        self._snapshot(entries)

    def _task(self, job: Job, payload: bytes | None) -> Task | Failed:
        """The work with its model in memory, or why it cannot be done."""
        if job.run_id is None:
            return NO_CUSTOM_LOSS
        if self._backlog.is_cancelled(job):
            return CANCELLED
        if payload is None:
            return Failed(message="the request is gone", category=RequestErrorCategory.Server)
        try:
            resident = self._residents.get(job.run_id)
        except StoreError:
            raise
        except TinkexError as error:
            return Failed(message=error.message, category=error.category)
        if job.position > 0 and not self._bench.engine.has_adapter(job.run_id):
            return Failed(
                message=f"model {job.run_id} could not be made",
                category=RequestErrorCategory.User,
            )
        return Task(job, resident.run, payload)

    def _count_change(self, job: Job, outcome: Outcome) -> int | None:
        """The change's number, if it was one."""
        if not outcome.is_change or job.run_id is None:
            return None
        resident = self._residents.get(job.run_id)
        self._snapshots.note_change(resident, job.kind, job.payload_bytes)
        return resident.applied

    def _snapshot(self, entries: Sequence[Entry]) -> None:
        """Write models that have changed enough; after their changes were handed to the store."""
        for entry in entries:
            run_id = entry.job.run_id
            if run_id is None:
                continue
            if not self._bench.engine.has_adapter(run_id):
                # It was unloaded, or could not be made.
                self._residents.drop(run_id)
            if entry.applied is not None:
                self._snapshots.take_if_due(self._residents.get(run_id), entry.job.kind)

    def _advance(self, job: Job) -> None:
        if job.run_id is not None:
            following = max(self._next_seq.get(job.run_id, 0), job.position + 1)
            self._next_seq[job.run_id] = following

    def _write_down(self, entries: Sequence[Entry]) -> None:
        if entries:
            self._ledger.finish(entries)

    # --- what is not urgent ----------------------------------------------------------------------
    def _do_chores(self) -> None:
        now = time.monotonic()
        if now < self._chores_at:
            return
        self._chores_at = now + CHORE_SECONDS
        self._lease.check()
        self._snapshots.take_due(list(self._residents))
        try:
            self._drop_cancelled()
            self._memory.evict_idle()
        except StoreError as error:
            # Nothing was done that is not on record, so there is no need to begin again.
            LOG.warning("cannot look after the models now: %s", error)
        # With everything on disk the store knows the numbers, so they need not pile up here.
        self._ledger.flush()
        self._next_seq.clear()

    def _drop_cancelled(self) -> None:
        """Stop what is cancelled in the store, although no bell told so."""
        tickets = self._samples.tickets
        self._cancel(self._database.write(lambda db: jobs.to_stop(db, tickets)))
