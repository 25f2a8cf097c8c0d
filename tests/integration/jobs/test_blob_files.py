"""A worker whose files are in an object store: no two workers need the same disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.jobs.conftest import WorkerHarness
from tinkex.checkpoint.blobs import BlobStore
from tinkex.checkpoint.places import STORE_ID_KEY, new_place
from tinkex.home import Home
from tinkex.jobs import housekeeping
from tinkex.jobs.housekeeping import HousekeepingPolicy
from tinkex.jobs.snapshots import SnapshotPolicy
from tinkex.store import blobs, checkpoints
from tinkex.store.records import CheckpointRecord, JobRecord

TOKENS = [1, 2, 3, 4]


@pytest.fixture
def harness(tmp_path: Path, blobs_url: str) -> Iterator[WorkerHarness]:
    harness = WorkerHarness(
        tmp_path,
        blobs_url=blobs_url,
        snapshots=SnapshotPolicy(max_changes=2),
        housekeeping=HousekeepingPolicy(interval_seconds=0.05),
    )
    BlobStore(blobs_url).create(STORE_ID_KEY, b"tests")
    yield harness
    harness.close()


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def move_to_other_machine(harness: WorkerHarness) -> None:
    """The next worker has an empty home."""
    harness.stop()
    harness.home = Home(harness.home.root / "other")
    harness.start()


def train(harness: WorkerHarness, run_id: str, first_seq: int, num_steps: int) -> list[bytes]:
    losses = []
    for seq in range(first_seq, first_seq + 2 * num_steps, 2):
        losses.append(harness.result(harness.forward_backward(run_id, seq, TOKENS)))
        harness.result(harness.optim_step(run_id, seq + 1))
    return losses


def record_of(harness: WorkerHarness, job: JobRecord) -> CheckpointRecord:
    record = harness.read(lambda db: checkpoints.find_by_id(db, job.id, time.time()))
    assert record is not None
    return record


def test_models_and_checkpoints_follow_to_another_machine(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    (tmp_path / "with home").mkdir()
    with_home = WorkerHarness(tmp_path / "with home")
    harness.start()
    with_home.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    other_tenant = with_home.tenant()
    other = with_home.model(other_tenant, with_home.session(other_tenant))
    assert train(harness, run_id, 1, 3) == train(with_home, other, 1, 3)
    saved = harness.save(run_id, 7, "first")
    harness.result(saved)
    with_home.result(with_home.save(other, 7, "first"))

    move_to_other_machine(harness)
    # The model comes from its snapshot.
    assert train(harness, run_id, 8, 1) == train(with_home, other, 8, 1)
    place = record_of(harness, saved).place
    assert place.startswith(f"checkpoints/{saved.id}/")
    harness.result(harness.load(run_id, 10, saved.id, place=place))
    sampler = harness.sampler(tenant, harness.run(run_id).session_id, saved.id)
    assert harness.result(harness.sample(sampler, 0))
    assert not harness.home.checkpoints.exists()
    with_home.close()


def test_places_go_with_their_last_row(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    session = harness.session(tenant)
    run_id = harness.model(tenant, session)
    saved = harness.save(run_id, 1, "first")
    harness.result(saved)
    record, store = record_of(harness, saved), BlobStore(harness.blobs_url)
    copy = CheckpointRecord(
        **{**record.to_columns(), "id": "copy", "name": "copy", "created_at": time.time()}
    )
    harness.database.write(lambda db: checkpoints.insert(db, copy))
    harness.database.write(lambda db: checkpoints.delete(db, saved.id, time.time()))
    eventually(lambda: saved.id not in harness.read(checkpoints.list_ids))
    assert record.place in store.list_places()
    harness.database.write(lambda db: checkpoints.delete(db, "copy", time.time()))
    eventually(lambda: record.place not in store.list_places())
    eventually(lambda: harness.read(lambda db: blobs.list_unused(db, 10)) == [])


def test_old_snapshots_are_removed(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    train(harness, run_id, 1, 4)
    harness.stop()
    harness.start()
    store = BlobStore(harness.blobs_url)
    eventually(lambda: list(store.list_places()) == [harness.run(run_id).snapshot])


def test_places_without_a_row_are_removed_when_old(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(harness.blobs_url)
    orphan = new_place("checkpoints", "crashed")
    store.create(f"{orphan}/adapter_model.safetensors", b"half")
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    saved = harness.save(run_id, 1, "first")
    harness.result(saved)
    place = record_of(harness, saved).place
    assert set(store.list_places()) == {orphan, place}
    harness.stop()
    monkeypatch.setattr(housekeeping, "BLOB_ORPHAN_AGE_SECONDS", -60.0)
    harness.start()
    eventually(lambda: orphan not in store.list_places())
    harness.stop()
    assert place in store.list_places()
