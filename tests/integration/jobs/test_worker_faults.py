"""A store, a disk or an engine in trouble for a moment costs no model and does nothing twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.jobs.conftest import BASE_MODEL, House, count
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


class Troubled(House):
    """A house whose worker may end by itself."""

    def ends(self) -> None:
        """Wait until the worker has ended of what went wrong."""
        assert self._thread is not None
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self._worker_database is not None
        self._worker_database.close()
        self.worker = self._thread = None

    def dies(self) -> None:
        """End the worker without its last snapshots, as a kill would."""
        assert self.worker is not None
        self.worker._shut_down = lambda: None  # type: ignore[method-assign]
        self.stop()

    def fresh(self) -> str:
        tenant = self.tenant()
        return self.model(tenant, self.session(tenant))


@pytest.fixture(autouse=True)
def silence(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What ended a worker's thread."""
    ended: list[BaseException] = []
    monkeypatch.setattr(
        threading, "excepthook", lambda args: ended.append(args.exc_value or SystemExit())
    )
    return ended


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Troubled]:
    made = Troubled(tmp_path, snapshots=NEVER)
    yield made
    made.close()


def fail_once(work: Callable[..., Any], is_it: Callable[..., bool]) -> Callable[..., Any]:
    failed: list[bool] = []

    def wrapped(*args: Any, **options: Any) -> Any:
        if not failed and is_it(*args):
            failed.append(True)
            raise StoreBusy("the server's database is busy; try again")
        return work(*args, **options)

    return wrapped


def finishes(kind: JobKind) -> Callable[..., bool]:
    return lambda db, entries, now: entries[0].job.kind == kind


def num_steps(house: House, run_id: str) -> int:
    return house.engine._adapters[run_id].trainer.moments.num_steps


# --- commits that fail ---------------------------------------------------------------------------
def test_what_was_done_after_a_failed_commit_is_not_written(
    house: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = house.fresh()
    made = [house.optim_step(run_id, place) for place in range(1, 20)]
    is_fifth = lambda db, entries, now: entries[0].job.id == made[4].id  # noqa: E731
    monkeypatch.setattr(result_log, "_finish", fail_once(result_log._store_results, is_fifth))
    house.start()
    house.ends()
    assert house.run(run_id).applied == 5  # the making and four steps
    house.start()
    for job in made:
        house.result(job)
    assert num_steps(house, run_id) == len(made)


def test_a_snapshot_is_never_ahead_of_what_is_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = Troubled(tmp_path, snapshots=SnapshotPolicy(max_changes=2))
    try:
        run_id = house.fresh()
        finish = fail_once(result_log._store_results, finishes(JobKind.OPTIM_STEP))
        monkeypatch.setattr(result_log, "_finish", finish)
        house.start()
        step = house.optim_step(run_id, 1)
        house.ends()
        assert house.run(run_id).snapshot_applied <= house.run(run_id).applied == 1
        house.start()
        house.result(step)
        assert num_steps(house, run_id) == 1
    finally:
        house.close()


def test_a_worker_that_was_replaced_leaves_snapshots_alone(
    tmp_path: Path,
) -> None:
    house = Troubled(tmp_path, snapshots=NEVER)
    try:
        house.start()
        run_id = house.fresh()
        house.result(house.optim_step(run_id, 1))
        house.database.write(
            lambda db: coordination.acquire_lease(db, "worker", "test", until=time.time() + 20.0)
        )
        house.stop()
        assert house.run(run_id).snapshot is None
    finally:
        house.close()


def test_an_older_snapshot_that_comes_late_goes_itself(house: Troubled) -> None:
    run_id = house.fresh()

    def enter(db: Connection) -> list[str | None]:
        return [
            runs.set_snapshot(db, run_id, "first", 1),
            runs.set_snapshot(db, run_id, "third", 3),
            runs.set_snapshot(db, run_id, "second", 2),
        ]

    assert house.database.write(enter) == [None, "first", "second"]
    assert house.run(run_id).snapshot == "third"


def test_a_busy_store_does_not_end_a_worker_that_has_nothing_to_write(
    house: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.jobs.worker.MAINTENANCE_SECONDS", 0.01)
    looked: list[bool] = []

    def idle(*_: object) -> None:
        looked.append(True)
        raise StoreBusy("the server's database is busy; try again")

    house.start()
    run_id = house.fresh()
    house.result(house.optim_step(run_id, 1))
    monkeypatch.setattr(runs, "idle", idle)
    _until(lambda: len(looked) > 3)
    house.result(house.optim_step(run_id, 2))


# --- a model that cannot come back now ------------------------------------------------------------
def test_a_busy_store_during_a_replay_costs_no_model(
    house: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.start()
    run_id = house.fresh()
    house.result(house.optim_step(run_id, 1))
    house.dies()
    monkeypatch.setattr(jobs, "changes_after", fail_once(jobs.list_changes_after, lambda *_: True))
    house.start()
    step = house.optim_step(run_id, 2)
    house.ends()
    house.start()
    house.result(step)
    assert num_steps(house, run_id) == 2


def test_a_base_model_that_is_not_served_for_a_while_costs_no_model(house: Troubled) -> None:
    house.start()
    run_id = house.fresh()
    house.result(house.optim_step(run_id, 1))
    house.stop()
    house.start(FakeEngine(["tinkex/other"]))
    refused = house.outcome(house.optim_step(run_id, 2)).job
    assert "tinkex/other" in (refused.error or "")
    house.stop()
    house.start()
    house.result(house.optim_step(run_id, 3))
    assert num_steps(house, run_id) == 2


def test_a_damaged_snapshot_is_told_for_good(house: Troubled) -> None:
    house.start()
    run_id = house.fresh()
    house.result(house.optim_step(run_id, 1))
    house.stop()
    (directory,) = house.home.snapshots.iterdir()
    next(directory.glob("*.safetensors")).write_bytes(b"not what it was")
    house.start()
    assert "damaged" in (house.outcome(house.optim_step(run_id, 2)).job.error or "")
    assert house.run(run_id).state == RunState.CORRUPTED


def test_weights_that_a_crash_would_load_again_outlive_their_deletion(tmp_path: Path) -> None:
    quick = HousekeepingPolicy(interval_seconds=0.01)
    house = Troubled(tmp_path, snapshots=NEVER, housekeeping=quick)
    try:
        house.start(NoCopies([BASE_MODEL]))
        run_id = house.fresh()
        saved = house.save(run_id, 1, "mine")
        house.result(saved)
        house.result(house.load(run_id, 2, saved.id))
        now = time.time()
        house.database.write(lambda db: checkpoints.delete(db, saved.id, now))
        other = house.save(run_id, 3, "other")
        house.result(other)
        house.database.write(lambda db: checkpoints.delete(db, other.id, now))
        _until(lambda: not house.home.checkpoint_directory(other.id).exists())
        house.dies()
        house.start()
        house.result(house.optim_step(run_id, 4))
        # A snapshot covers it now, so the files may go.
        house.stop()
        house.start()
        _until(lambda: not house.home.checkpoint_directory(saved.id).exists())
    finally:
        house.close()


class NoCopies(FakeEngine):
    """Has no memory left to copy a state into."""

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        raise MemoryError


def test_a_state_that_cannot_be_copied_does_not_end_the_worker(tmp_path: Path) -> None:
    house = House(tmp_path, snapshots=SnapshotPolicy(max_changes=1))
    try:
        house.start(NoCopies([BASE_MODEL]))
        tenant = house.tenant()
        run_id = house.model(tenant, house.session(tenant))
        for place in (1, 2, 3):
            house.result(house.optim_step(run_id, place))
        house.stop()
    finally:
        house.close()


# --- models that leave ----------------------------------------------------------------------------
def test_an_unloaded_model_leaves_nothing_to_come_back_from(tmp_path: Path) -> None:
    house = House(tmp_path, snapshots=SnapshotPolicy(max_changes=2))
    try:
        house.start()
        tenant = house.tenant()
        run_id = house.model(tenant, house.session(tenant))
        for place in (1, 2, 3, 4):
            house.result(house.optim_step(run_id, place))
        house.result(house.op(run_id, 5, JobKind.UNLOAD_MODEL, b"{}"))
        _until(lambda: not any(house.home.snapshots.iterdir()))
        house.stop()
        kept = sa.select(sa.func.count()).where(job_table.c.payload.is_not(None))
        assert count(house.database, kept) == 0
        assert house.run(run_id).snapshot is None
    finally:
        house.close()


def test_an_operation_with_the_number_of_the_making_does_no_harm(house: Troubled) -> None:
    house.start()
    run_id = house.fresh()
    house.result(house.optim_step(run_id, 1))
    payload = encode_json({"path": "tinker://a/weights/b", "checkpoint_id": "none"})
    refused = house.op(run_id, 0, JobKind.LOAD_WEIGHTS, payload)
    assert house.outcome(refused).job.error
    house.result(house.optim_step(run_id, 2))
    assert house.run(run_id).state == RunState.READY
    assert num_steps(house, run_id) == 2


def _until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.005)
