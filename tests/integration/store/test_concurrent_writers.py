"""Writers that do not exclude each other: fencing, order of numbers, repeated keys, conflicts.

Each test interleaves two transactions in the order that would go wrong without its lock. SQLite has
one writer, so there most of these orders cannot happen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.store_rows import (
    NOW,
    add_job,
    add_run,
    add_sampler,
    add_session,
    add_tenant,
    count,
    new_job,
)
from tinkex.checkpoint.storage import FileStorage
from tinkex.errors import StoreUnavailable
from tinkex.home import Home
from tinkex.jobs import lease as lease_module
from tinkex.jobs import queue_poller
from tinkex.jobs.fair_queue import BatchLimits, FairQueue
from tinkex.jobs.job_types import Completed, Effect, JobKind
from tinkex.jobs.lease import WorkerLease
from tinkex.jobs.queue import JobQueue, QueueLimits
from tinkex.jobs.queue_poller import QueuePoller
from tinkex.jobs.result_log import LeaseLost, ResultEntry, ResultLog, count_usage
from tinkex.store import accounting, groups, jobs, samplers, schema, settings
from tinkex.store import database as database_module
from tinkex.store.database import Connection, Database
from tinkex.store.dialects import is_conflict
from tinkex.store.records import JobRecord, JobState, SessionRecord
from tinkex.store.write_locks import SHARED, lease_locks

TIMEOUT_SECONDS = 60.0
#: How long a test looks whether something that must wait happens anyway.
NEVER_SECONDS = 0.3
OpenDatabase = Callable[..., Database]


@pytest.fixture
def session(database: Database) -> SessionRecord:
    return add_session(database, add_tenant(database))


@pytest.fixture
def other(open_database: OpenDatabase) -> Database:
    """The same store, opened by another process."""
    return open_database()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


class Pause:
    """Stops a transaction in the middle until the test continues."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._continued = threading.Event()

    def __call__(self, _db: Connection) -> None:
        self._entered.set()
        assert self._continued.wait(TIMEOUT_SECONDS)

    def wait_until_entered(self) -> None:
        assert self._entered.wait(TIMEOUT_SECONDS)

    def resume(self) -> None:
        self._continued.set()


def entry_of(job: JobRecord, *effects: Effect) -> ResultEntry:
    return ResultEntry(job, Completed(result=b"result", effects=effects), None, NOW)


def is_waiting(future: Future[object]) -> bool:
    return not wait([future], timeout=NEVER_SECONDS).done


@contextmanager
def lost_epoch(database: Database, name: str) -> Iterator[ResultLog]:
    """Yield the result log of a worker that holds the first epoch of a lease."""
    epoch = database.write(lambda db: lease_module._try_acquire(db, name, "first", None))
    assert isinstance(epoch, int)
    with closing(ResultLog(database, epoch, lease=name)) as log:
        yield log


# --- fencing -----------------------------------------------------------------------------------
def test_successor_reads_after_the_last_commit_of_the_fenced_worker(
    database: Database, other: Database, session: SessionRecord, threads: ThreadPoolExecutor
) -> None:
    job, late = add_job(database, session), add_job(database, session)
    pause = Pause()

    def take_over() -> tuple[JobState | str, int]:
        # The same owner takes its lease at once.
        with closing(closing_lease(other)):
            found = other.read(lambda db: jobs.find(db, job.id))
            return found.state, count(other, schema.steps)

    with lost_epoch(database, "worker") as log:
        log.finish([entry_of(job, pause)])
        pause.wait_until_entered()
        successor = threads.submit(take_over)
        assert is_waiting(successor)
        pause.resume()
        state, num_steps = successor.result(TIMEOUT_SECONDS)
        assert (state, num_steps) == (JobState.DONE, 1)

        log.flush()
        log.finish([entry_of(late)])
        with pytest.raises(LeaseLost):
            log.flush()
    assert database.read(lambda db: jobs.find(db, late.id)).state == JobState.QUEUED
    assert count(database, schema.steps) == 1


class _ClosableLease(WorkerLease):
    def close(self) -> None:
        self.release()


def closing_lease(database: Database) -> _ClosableLease:
    return _ClosableLease(database, "worker", "first")


def test_groups_do_not_wait_for_each_other(
    database: Database, other: Database, session: SessionRecord
) -> None:
    if database.is_sqlite:
        return
    pause, (first, second) = Pause(), (add_job(database, session) for _ in range(2))
    with lost_epoch(database, "group:a") as held, lost_epoch(other, "group:b") as free:
        held.finish([entry_of(first, pause)])
        pause.wait_until_entered()
        free.finish([entry_of(second)])
        free.flush()
        pause.resume()
        held.flush()
    assert count(database, schema.steps) == 2


def test_worker_waits_for_a_cut_off_predecessor(
    database: Database, other: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    if database.is_sqlite:
        return
    monkeypatch.setattr(database_module, "IDLE_TRANSACTION_SECONDS", 0.5)
    other._busy_seconds = 0.2
    cut_off = database.begin(lease_locks("worker"))
    db = cut_off.__enter__()
    # Its first attempts time out; PostgreSQL then ends the idle transaction.
    with closing(closing_lease(other)) as taken:
        assert taken.epoch == 1
    with pytest.raises(sa.exc.SQLAlchemyError):
        db.execute(sa.select(1))
    with pytest.raises(sa.exc.SQLAlchemyError):
        cut_off.__exit__(None, None, None)


# --- numbers -----------------------------------------------------------------------------------
@pytest.mark.parametrize("is_announced", [True, False])
def test_worker_finds_jobs_that_are_committed_out_of_order(
    database: Database,
    other: Database,
    session: SessionRecord,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    is_announced: bool,
) -> None:
    if database.is_sqlite:
        return
    monkeypatch.setattr(queue_poller, "LATE_SECONDS", TIMEOUT_SECONDS if is_announced else 0.0)
    waiting = FairQueue(BatchLimits())
    poller = QueuePoller(database, "", waiting, FileStorage(Home(tmp_path), None))
    poller.fetch()
    with other.begin(SHARED) as db:
        late = jobs.insert(db, new_job(session, kind=JobKind.SAMPLE), NOW)
        assert late is not None
        early = database.write(
            lambda db: jobs.insert(db, new_job(session, kind=JobKind.SAMPLE), NOW), SHARED
        )
        assert early is not None and early.no > late.no
        poller.fetch()
        assert early.id in waiting
        # It is running, but the store does not know that yet.
        assert waiting.next_samples(8, [], 8) == [early]
    if is_announced:
        poller.announce(late.no)
        poller.announce(early.no)
    poller.fetch()
    assert late.id in waiting
    assert early.id not in waiting, "a started job must not be fetched again"


def test_job_that_is_late_by_many_numbers_is_found_among_all(
    database: Database,
    other: Database,
    session: SessionRecord,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if database.is_sqlite:
        return
    monkeypatch.setattr(queue_poller, "ALL_SECONDS", 0.0)
    waiting = FairQueue(BatchLimits())
    poller = QueuePoller(database, "", waiting, FileStorage(Home(tmp_path), None))
    poller._fetched = queue_poller.FetchedNumbers(max_numbers=4)
    with other.begin(SHARED) as db:
        late = jobs.insert(db, new_job(session), NOW)
        assert late is not None
        for _ in range(10):
            database.write(lambda db: jobs.insert(db, new_job(session), NOW), SHARED)
        poller.fetch()
    poller.fetch()
    assert late.id not in waiting
    poller.fetch_all_if_due()
    assert late.id in waiting


def test_batched_poll_misses_no_completion(
    database: Database, other: Database, session: SessionRecord, threads: ThreadPoolExecutor
) -> None:
    sampler = add_sampler(database, session)
    first, second = (add_job(database, session, sampler_id=sampler.id) for _ in range(2))
    pause, seen, cursor = Pause(), [], 0

    def poll() -> None:
        nonlocal cursor
        found, cursor = database.read(
            lambda db: samplers.list_completions(db, sampler.id, 0, cursor, 10)
        )
        seen.extend(completion.job_id for completion in found)

    with lost_epoch(database, "group:a") as one, lost_epoch(other, "group:b") as two:
        # Its completion has the lower number, and is committed later.
        one.finish([entry_of(first, pause)])
        pause.wait_until_entered()
        flushed = threads.submit(lambda: (two.finish([entry_of(second)]), two.flush()))
        assert is_waiting(flushed)
        poll()
        pause.resume()
        flushed.result(TIMEOUT_SECONDS)
        poll()
        one.flush()
    poll()
    assert seen == [first.id, second.id]


def test_cancelled_sample_keeps_the_order_of_completions(
    database: Database, other: Database, session: SessionRecord
) -> None:
    sampler = add_sampler(database, session)
    first, second = (
        add_job(database, session, sampler_id=sampler.id, kind=JobKind.SAMPLE) for _ in range(2)
    )
    pause = Pause()
    queue = JobQueue(other, QueueLimits(), b"secret")
    with lost_epoch(database, "group:a") as log, closing(queue):
        log.finish([entry_of(first, pause)])
        pause.wait_until_entered()
        cancelled = queue.cancel(session.tenant_id, second.id)
        assert is_waiting(cancelled)
        pause.resume()
        assert cancelled.result(TIMEOUT_SECONDS)
        log.flush()
    found, _ = database.read(lambda db: samplers.list_completions(db, sampler.id, 0, 0, 10))
    assert [completion.job_id for completion in found] == [first.id, second.id]


# --- submits -----------------------------------------------------------------------------------
def test_two_processes_store_the_same_key_once(
    database: Database, other: Database, session: SessionRecord
) -> None:
    if database.is_sqlite:
        return
    barrier = threading.Barrier(2, timeout=TIMEOUT_SECONDS)
    queues = [JobQueue(one, QueueLimits(), b"secret") for one in (database, other)]
    new = new_job(session, id="", key="sample:1")
    # Both have looked for the key before either stores it.
    submitted = [queue.submit(new, lambda _db: barrier.wait() and None) for queue in queues]
    ids = {future.result(TIMEOUT_SECONDS).id for future in submitted}
    assert len(ids) == 1
    assert count(database, schema.jobs) == 1
    for queue in queues:
        queue.close()


def test_unnumbered_operations_of_two_processes_get_different_positions(
    database: Database, other: Database, session: SessionRecord
) -> None:
    run = add_run(database, session)
    pause = Pause()
    queues = [JobQueue(one, QueueLimits(), b"secret") for one in (database, other)]
    new = new_job(session, id="", kind=JobKind.UNLOAD_MODEL, run_id=run.id, position=None)
    first = queues[0].submit(new, pause)
    pause.wait_until_entered()
    second = queues[1].submit(new)
    assert is_waiting(second)
    pause.resume()
    positions = [future.result(TIMEOUT_SECONDS).position for future in (first, second)]
    assert positions == [0, 1]
    for queue in queues:
        queue.close()


def test_job_follows_its_model_that_moves_at_the_same_moment(
    database: Database, other: Database, session: SessionRecord, threads: ThreadPoolExecutor
) -> None:
    run = add_run(database, session)
    pause = Pause()
    queue = JobQueue(database, QueueLimits(), b"secret")
    new = new_job(session, id="", kind=JobKind.OPTIM_STEP, run_id=run.id, position=1)
    submitted = queue.submit(new, pause)
    pause.wait_until_entered()
    moved = threads.submit(other.write, lambda db: groups.move_runs(db, [run.id], "new"))
    assert is_waiting(moved)
    pause.resume()
    moved.result(TIMEOUT_SECONDS)
    job = submitted.result(TIMEOUT_SECONDS)
    assert database.read(lambda db: jobs.find(db, job.id)).group_id == "new"
    assert not database.read(groups.list_strays)
    queue.close()


# --- conflicts ---------------------------------------------------------------------------------
def record_conflicts(database: Database) -> list[BaseException]:
    """Return a list of the deadlocks and serialization failures from now on."""
    conflicts: list[BaseException] = []

    def record(context: sa.engine.ExceptionContext) -> None:
        if is_conflict(context.original_exception):
            conflicts.append(context.original_exception)

    sa.event.listen(database.engine, "handle_error", record)
    return conflicts


def test_writes_whose_connection_is_lost_all_report_it(database: Database) -> None:
    if database.is_sqlite:
        # It has no connections that could be lost.
        return
    pause = Pause()
    first = database.write_soon(pause)
    pause.wait_until_entered()
    terminate = sa.text("SELECT pg_terminate_backend(pg_backend_pid())")
    # They wait for the first, and so share a transaction.
    writes = [database.write_soon(lambda db: db.execute(terminate)) for _ in range(2)]
    pause.resume()
    first.result(TIMEOUT_SECONDS)
    for write in writes:
        with pytest.raises(StoreUnavailable, match="cannot be used"):
            write.result(TIMEOUT_SECONDS)
    assert database.write(lambda db: db.execute(sa.text("SELECT 1")).scalar()) == 1


def test_usage_of_two_workers_is_added_without_a_conflict(
    database: Database, other: Database, session: SessionRecord
) -> None:
    if database.is_sqlite:
        return
    barrier = threading.Barrier(2, timeout=TIMEOUT_SECONDS)
    tries: list[str] = []
    first, second = (add_job(database, session) for _ in range(2))

    def effects(job: JobRecord, kinds: tuple[str, str]) -> tuple[Effect, ...]:
        # Both transactions have added to their first kind before either adds to the other's.
        one, two = (
            count_usage(job, run_id="", base_model="m", kind=kind, amount=3) for kind in kinds
        )

        def meet(_db: Connection) -> None:
            tries.append(job.id)
            if len(tries) <= 2:
                barrier.wait()

        return one, meet, two

    with lost_epoch(database, "group:a") as one, lost_epoch(other, "group:b") as two:
        one.finish([entry_of(first, *effects(first, ("prefill", "sample")))])
        two.finish([entry_of(second, *effects(second, ("sample", "prefill")))])
        one.flush()
        two.flush()
    assert sorted(tries) == sorted([first.id, second.id])
    hour = time.time() + 3600
    found = database.read(lambda db: accounting.list_usage(db, session.tenant_id, 0, hour))
    assert {record.kind: record.amount for record in found} == {"prefill": 6, "sample": 6}


def test_usage_of_a_failed_write_is_not_added(database: Database, session: SessionRecord) -> None:
    job = add_job(database, session)

    def fail(db: Connection) -> None:
        count_usage(job, run_id="", base_model="m", kind="sample", amount=1)(db)
        raise ValueError("mine alone")

    pause = Pause()
    blocked = database.write_soon(pause)
    pause.wait_until_entered()
    failed = database.write_soon(fail)
    added = database.write_soon(
        count_usage(job, run_id="", base_model="m", kind="sample", amount=10)
    )
    pause.resume()
    for future in (blocked, added):
        future.result(TIMEOUT_SECONDS)
    assert isinstance(failed.exception(TIMEOUT_SECONDS), ValueError)
    rows = database.read(lambda db: db.execute(sa.select(schema.usage.c.amount)).scalars().all())
    assert rows == [10]


def _cross(database: Database, barrier: threading.Barrier, *names: str) -> Future[list[None]]:
    """Write two settings, the second when the other transaction has written its first."""
    meet = iter([barrier.wait])

    def work(db: Connection) -> list[None]:
        db.exec_driver_sql("SET LOCAL deadlock_timeout = '20ms'")
        written = []
        for name in names:
            written.append(settings.put(db, name, f"{names}"))
            # Only the first try meets the other transaction.
            next(meet, lambda: None)()
        return written

    return database.write_soon(work, SHARED)


def test_deadlocked_transaction_is_repeated(database: Database, other: Database) -> None:
    if database.is_sqlite:
        return
    conflicts = [record_conflicts(one) for one in (database, other)]
    barrier = threading.Barrier(2, timeout=TIMEOUT_SECONDS)
    first = _cross(database, barrier, "a", "b")
    second = _cross(other, barrier, "b", "a")
    for future in (first, second):
        assert len(future.result(TIMEOUT_SECONDS)) == 2
    assert sum(map(len, conflicts)) == 1


def test_settings_of_a_transaction_do_not_stay_with_its_connection(database: Database) -> None:
    if database.is_sqlite:
        return
    names = ("lock_timeout", "idle_in_transaction_session_timeout")

    def show(db: Connection) -> list[object]:
        return [db.scalar(sa.text(f"SHOW {name}")) for name in names]

    assert database.write(show, lease_locks("worker")) == ["5s", "15s"]
    assert database.write(show) == ["5s", "15s"]
    # As a pooler in transaction mode requires.
    assert database.read(show) == ["0", "0"]


# --- many writers ------------------------------------------------------------------------------
def _work_as_group(url: str, session: SessionRecord, name: str, deadline: float) -> int:
    """Submit, start, finish and fetch jobs of one group; returns how many."""
    sampler_ids = [f"sampler-{number}" for number in range(8)]
    with closing(Database(url)) as database, lost_epoch(database, f"group:{name}") as log:
        conflicts, num_jobs = record_conflicts(database), 0
        while time.monotonic() < deadline:
            submitted = [
                database.write_soon(
                    lambda db, one=one: jobs.insert(db, new_job(session, sampler_id=one), NOW),
                    SHARED,
                )
                for one in sampler_ids
            ]
            stored = [future.result(TIMEOUT_SECONDS) for future in submitted]
            entries = [
                entry_of(job, count_usage(job, run_id="", base_model="m", kind=kind, amount=1))
                for job in stored
                for kind in [("sample", "prefill")[len(job.id) % 2]]
            ]
            log.start([job.id for job in stored])
            log.finish(entries)
            log.flush()
            ids = [job.id for job in stored]
            database.write(lambda db, ids=ids: jobs.mark_fetched(db, ids, NOW), SHARED)
            num_jobs += len(stored)
        assert not conflicts
        return num_jobs


@pytest.mark.parametrize(
    "seconds", [1.0, pytest.param(60.0, marks=pytest.mark.slow)], ids=["second", "minute"]
)
def test_eight_writers_lose_nothing_and_never_deadlock(
    database: Database,
    url: str,
    session: SessionRecord,
    threads: ThreadPoolExecutor,
    seconds: float,
) -> None:
    deadline = time.monotonic() + seconds
    working = [
        threads.submit(_work_as_group, url, session, str(number), deadline) for number in range(8)
    ]
    seen: dict[str, list[str]] = {f"sampler-{number}": [] for number in range(8)}
    cursors = dict.fromkeys(seen, 0)

    def poll() -> None:
        for one, ids in seen.items():
            found, cursors[one] = database.read(
                lambda db, one=one: samplers.list_completions(db, one, 0, cursors[one], 1000)
            )
            ids.extend(completion.job_id for completion in found)

    while wait(working, timeout=0.02).not_done:
        poll()
    num_jobs = sum(future.result() for future in working)
    for _ in range(num_jobs // 1000 + 1):
        poll()
    assert sum(map(len, seen.values())) == len({one for ids in seen.values() for one in ids})
    assert sum(map(len, seen.values())) == count(database, schema.steps) == num_jobs > 0
    amounts = database.read(lambda db: db.scalar(sa.select(sa.func.sum(schema.usage.c.amount))))
    assert amounts == num_jobs
