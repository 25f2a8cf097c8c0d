"""Temporary failures of store, disk or engine lose no model and repeat no operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.jobs.conftest import BASE_MODEL, WorkerHarness, count
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import WriteSnapshot
from tinkex.errors import StoreBusy
from tinkex.jobs import result_log
from tinkex.jobs.housekeeping import HousekeepingPolicy
from tinkex.jobs.job_types import JobKind
from tinkex.jobs.snapshots import SnapshotPolicy
from tinkex.store import checkpoints, coordination, jobs, runs
from tinkex.store.database import Connection
from tinkex.store.records import RunState
from tinkex.store.schema import jobs as job_table
from tinkex.wire.codec import encode_json

TOKENS = [1, 2, 3, 4]
NEVER = SnapshotPolicy(max_changes=10_000, max_seconds=1e9)


class FaultyWorkerHarness(WorkerHarness):
    """A harness whose worker may crash."""

    def wait_for_crash(self) -> None:
        """Wait until the worker has crashed."""
        assert self._thread is not None
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self._worker_database is not None
        self._worker_database.close()
        self.worker = self._thread = None

    def kill(self) -> None:
        """Stop the worker without final snapshots, like a kill."""
        assert self.worker is not None
        self.worker._shut_down = lambda: None  # type: ignore[method-assign]
        self.stop()

    def create_model_with_tenant(self) -> str:
        tenant = self.tenant()
        return self.model(tenant, self.session(tenant))


@pytest.fixture(autouse=True)
def thread_errors(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Return the exceptions that ended worker threads."""
    errors: list[BaseException] = []
    monkeypatch.setattr(
        threading, "excepthook", lambda args: errors.append(args.exc_value or SystemExit())
    )
    return errors


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[FaultyWorkerHarness]:
    worker_harness = FaultyWorkerHarness(tmp_path, snapshots=NEVER)
    yield worker_harness
    worker_harness.close()


def fail_once(work: Callable[..., Any], should_fail: Callable[..., bool]) -> Callable[..., Any]:
    failed: list[bool] = []

    def wrapped(*args: Any, **options: Any) -> Any:
        if not failed and should_fail(*args):
            failed.append(True)
            raise StoreBusy("the server's database is busy; try again")
        return work(*args, **options)

    return wrapped


def finishes_kind(kind: JobKind) -> Callable[..., bool]:
    return lambda db, entries, now: entries[0].job.kind == kind


def num_steps(harness: WorkerHarness, run_id: str) -> int:
    return harness.engine._adapters[run_id].trainer.moments.num_steps


# --- commits that fail ---------------------------------------------------------------------------
def test_work_after_failed_commit_is_not_persisted(
    harness: FaultyWorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = harness.create_model_with_tenant()
    steps = [harness.optim_step(run_id, place) for place in range(1, 20)]
    is_fifth = lambda db, entries, now: entries[0].job.id == steps[4].id  # noqa: E731
    store_results = fail_once(result_log._store_results, is_fifth)
    monkeypatch.setattr(result_log, "_store_results", store_results)
    harness.start()
    harness.wait_for_crash()
    assert harness.run(run_id).applied == 5  # the making and four steps
    harness.start()
    for job in steps:
        harness.result(job)
    assert num_steps(harness, run_id) == len(steps)


def test_snapshot_is_never_newer_than_committed_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = FaultyWorkerHarness(tmp_path, snapshots=SnapshotPolicy(max_changes=2))
    try:
        run_id = harness.create_model_with_tenant()
        finish = fail_once(result_log._store_results, finishes_kind(JobKind.OPTIM_STEP))
        monkeypatch.setattr(result_log, "_store_results", finish)
        harness.start()
        step = harness.optim_step(run_id, 1)
        harness.wait_for_crash()
        assert harness.run(run_id).snapshot_applied <= harness.run(run_id).applied == 1
        harness.start()
        harness.result(step)
        assert num_steps(harness, run_id) == 1
    finally:
        harness.close()


def test_worker_without_lease_writes_no_snapshot(
    tmp_path: Path,
) -> None:
    harness = FaultyWorkerHarness(tmp_path, snapshots=NEVER)
    try:
        harness.start()
        run_id = harness.create_model_with_tenant()
        harness.result(harness.optim_step(run_id, 1))
        harness.database.write(
            lambda db: coordination.acquire_lease(db, "worker", "test", until=time.time() + 20.0)
        )
        harness.stop()
        assert harness.run(run_id).snapshot is None
    finally:
        harness.close()


def test_late_older_snapshot_is_discarded(harness: FaultyWorkerHarness) -> None:
    run_id = harness.create_model_with_tenant()

    def enter(db: Connection) -> list[str | None]:
        return [
            runs.set_snapshot(db, run_id, "first", 1),
            runs.set_snapshot(db, run_id, "third", 3),
            runs.set_snapshot(db, run_id, "second", 2),
        ]

    assert harness.database.write(enter) == [None, "first", "second"]
    assert harness.run(run_id).snapshot == "third"


def test_store_busy_does_not_stop_idle_worker(
    harness: FaultyWorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.jobs.worker.MAINTENANCE_SECONDS", 0.01)
    looked: list[bool] = []

    def idle(*_: object) -> None:
        looked.append(True)
        raise StoreBusy("the server's database is busy; try again")

    harness.start()
    run_id = harness.create_model_with_tenant()
    harness.result(harness.optim_step(run_id, 1))
    monkeypatch.setattr(runs, "list_idle", idle)
    _until(lambda: len(looked) > 3)
    harness.result(harness.optim_step(run_id, 2))


# --- a model that cannot come back now ------------------------------------------------------------
def test_store_busy_during_replay_keeps_model(
    harness: FaultyWorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.start()
    run_id = harness.create_model_with_tenant()
    harness.result(harness.optim_step(run_id, 1))
    harness.kill()
    list_changes = fail_once(jobs.list_changes_after, lambda *_: True)
    monkeypatch.setattr(jobs, "list_changes_after", list_changes)
    harness.start()
    step = harness.optim_step(run_id, 2)
    harness.wait_for_crash()
    harness.start()
    harness.result(step)
    assert num_steps(harness, run_id) == 2


def test_temporarily_missing_base_model_keeps_model(
    harness: FaultyWorkerHarness,
) -> None:
    harness.start()
    run_id = harness.create_model_with_tenant()
    harness.result(harness.optim_step(run_id, 1))
    harness.stop()
    harness.start(FakeEngine(["tinkex/other"]))
    refused = harness.outcome(harness.optim_step(run_id, 2)).job
    assert "tinkex/other" in (refused.error or "")
    harness.stop()
    harness.start()
    harness.result(harness.optim_step(run_id, 3))
    assert num_steps(harness, run_id) == 2


def test_corrupt_snapshot_marks_run_corrupted(harness: FaultyWorkerHarness) -> None:
    harness.start()
    run_id = harness.create_model_with_tenant()
    harness.result(harness.optim_step(run_id, 1))
    harness.stop()
    (directory,) = harness.home.snapshots.iterdir()
    next(directory.glob("*.safetensors")).write_bytes(b"not what it was")
    harness.start()
    assert "damaged" in (harness.outcome(harness.optim_step(run_id, 2)).job.error or "")
    assert harness.run(run_id).state == RunState.CORRUPTED


def test_deleted_weights_are_kept_while_replay_needs_them(tmp_path: Path) -> None:
    quick = HousekeepingPolicy(interval_seconds=0.01)
    harness = FaultyWorkerHarness(tmp_path, snapshots=NEVER, housekeeping=quick)
    try:
        harness.start(SnapshotCopyFails([BASE_MODEL]))
        run_id = harness.create_model_with_tenant()
        saved = harness.save(run_id, 1, "mine")
        harness.result(saved)
        harness.result(harness.load(run_id, 2, saved.id))
        now = time.time()
        harness.database.write(lambda db: checkpoints.delete(db, saved.id, now))
        other = harness.save(run_id, 3, "other")
        harness.result(other)
        harness.database.write(lambda db: checkpoints.delete(db, other.id, now))
        _until(lambda: not harness.home.checkpoint_directory(other.id).exists())
        harness.kill()
        harness.start()
        harness.result(harness.optim_step(run_id, 4))
        # A snapshot includes it now, so the files can be deleted.
        harness.stop()
        harness.start()
        _until(lambda: not harness.home.checkpoint_directory(saved.id).exists())
    finally:
        harness.close()


class SnapshotCopyFails(FakeEngine):
    """An engine that cannot copy a state for a snapshot."""

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        raise MemoryError


def test_snapshot_copy_error_does_not_stop_worker(tmp_path: Path) -> None:
    harness = WorkerHarness(tmp_path, snapshots=SnapshotPolicy(max_changes=1))
    try:
        harness.start(SnapshotCopyFails([BASE_MODEL]))
        tenant = harness.tenant()
        run_id = harness.model(tenant, harness.session(tenant))
        for place in (1, 2, 3):
            harness.result(harness.optim_step(run_id, place))
        harness.stop()
    finally:
        harness.close()


# --- models that leave ----------------------------------------------------------------------------
def test_unload_removes_snapshot_and_payloads(tmp_path: Path) -> None:
    harness = WorkerHarness(tmp_path, snapshots=SnapshotPolicy(max_changes=2))
    try:
        harness.start()
        tenant = harness.tenant()
        run_id = harness.model(tenant, harness.session(tenant))
        for place in (1, 2, 3, 4):
            harness.result(harness.optim_step(run_id, place))
        harness.result(harness.op(run_id, 5, JobKind.UNLOAD_MODEL, b"{}"))
        _until(lambda: not any(harness.home.snapshots.iterdir()))
        harness.stop()
        with_payload = sa.select(sa.func.count()).where(job_table.c.payload.is_not(None))
        assert count(harness.database, with_payload) == 0
        assert harness.run(run_id).snapshot is None
    finally:
        harness.close()


def test_failed_operation_with_seq_id_zero_keeps_model_ready(harness: FaultyWorkerHarness) -> None:
    harness.start()
    run_id = harness.create_model_with_tenant()
    harness.result(harness.optim_step(run_id, 1))
    payload = encode_json({"path": "tinker://a/weights/b", "checkpoint_id": "none"})
    refused = harness.op(run_id, 0, JobKind.LOAD_WEIGHTS, payload)
    assert harness.outcome(refused).job.error
    harness.result(harness.optim_step(run_id, 2))
    assert harness.run(run_id).state == RunState.READY
    assert num_steps(harness, run_id) == 2


def _until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.005)
