"""A worker whose files are in an object store: no two workers need the same disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
import pytest

from tests.integration.jobs.conftest import WorkerHarness
from tests.integration.jobs.test_worker import flip_last_bit
from tests.support.s3_server import S3Bucket
from tinkex.checkpoint.blobs import BlobStore
from tinkex.checkpoint.places import STORE_ID_KEY, new_place
from tinkex.home import Home
from tinkex.jobs import housekeeping
from tinkex.jobs.housekeeping import HousekeepingPolicy
from tinkex.jobs.snapshots import SnapshotPolicy
from tinkex.store import blobs, checkpoints
from tinkex.store.records import CheckpointRecord, JobRecord, JobState

TOKENS = [1, 2, 3, 4]


@contextmanager
def open_harness(root: Path, blobs_url: str) -> Iterator[WorkerHarness]:
    harness = WorkerHarness(
        root,
        blobs_url=blobs_url,
        snapshots=SnapshotPolicy(max_changes=2),
        housekeeping=HousekeepingPolicy(interval_seconds=0.05),
    )
    BlobStore(blobs_url).create(STORE_ID_KEY, b"tests")
    yield harness
    harness.close()


@pytest.fixture
def harness(tmp_path: Path, s3: S3Bucket) -> Iterator[WorkerHarness]:
    with open_harness(tmp_path, s3.url) as harness:
        yield harness


@pytest.fixture
def any_harness(tmp_path: Path, blobs_url: str) -> Iterator[WorkerHarness]:
    """On an object store of each kind."""
    with open_harness(tmp_path, blobs_url) as harness:
        yield harness


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


def overwrite(store: BlobStore, key: str, content: bytes) -> None:
    """Damage an object."""
    obstore.put(store._store, key, content)


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
    any_harness: WorkerHarness, tmp_path: Path
) -> None:
    harness = any_harness
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


def test_large_payloads_are_read_again_after_a_crash(harness: WorkerHarness) -> None:
    harness.options["snapshots"] = SnapshotPolicy(max_changes=1000)
    store = BlobStore(harness.blobs_url)
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    with_payload = harness.forward_backward_in_blobs(run_id, 1, TOKENS)
    first = harness.result(with_payload)
    harness.result(harness.optim_step(run_id, 2))
    assert harness.engine.has_adapter(run_id)
    # A worker that was killed leaves no snapshot.
    harness.kill()
    assert harness.run(run_id).snapshot is None
    move_to_other_machine(harness)
    second = harness.result(harness.forward_backward_in_blobs(run_id, 3, TOKENS))
    assert first != second
    harness.stop()  # a snapshot includes all changes
    harness.start()
    eventually(lambda: not any(place.startswith("payloads/") for place in store.list_places()))


def test_payload_of_a_failed_job_is_removed(harness: WorkerHarness) -> None:
    store = BlobStore(harness.blobs_url)
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    failed = harness.forward_backward_in_blobs(run_id, 1, TOKENS, payload=b"not a request")
    assert failed.payload_ref in store.list_places()
    harness.start()
    assert harness.outcome(failed).job.error
    eventually(lambda: failed.payload_ref not in store.list_places())


def test_damaged_payload_fails_its_job_alone(harness: WorkerHarness) -> None:
    store = BlobStore(harness.blobs_url)
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    damaged = harness.forward_backward_in_blobs(run_id, 1, TOKENS)
    overwrite(store, f"{damaged.payload_ref}/payload", b"damaged")
    harness.start()
    assert "damaged in the object store" in str(harness.outcome(damaged).job.error)
    harness.result(harness.forward_backward(run_id, 2, TOKENS))


def test_damaged_copy_is_downloaded_again(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    saved = harness.save(run_id, 1, "first")
    harness.result(saved)
    place = record_of(harness, saved).place
    flip_last_bit(harness.open_blobs().local_path(place) / "adapter_model.safetensors")
    harness.result(harness.load(run_id, 2, saved.id, place=place))


def test_damaged_snapshot_ends_the_model_and_nothing_else(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    train(harness, run_id, 1, 1)
    harness.stop()
    snapshot, store = harness.run(run_id).snapshot, BlobStore(harness.blobs_url)
    assert snapshot is not None
    names = store.read_manifest(snapshot).files
    damaged = next(name for name in names if name.endswith(".safetensors"))
    overwrite(store, f"{snapshot}/{damaged}", b"x" * names[damaged].size)
    move_to_other_machine(harness)
    step = harness.optim_step(run_id, 3)
    assert "create a new one from your last checkpoint" in str(harness.outcome(step).job.error)
    other = harness.model(tenant, harness.session(tenant))
    train(harness, other, 1, 1)


class TestOutage:
    """The object store goes away and returns; nothing is lost, and training goes on."""

    def test_saves_wait_and_training_goes_on(self, harness: WorkerHarness, s3: S3Bucket) -> None:
        harness.start()
        tenant = harness.tenant()
        session = harness.session(tenant)
        run_id, other = (harness.model(tenant, session, number) for number in (0, 1))
        train(harness, run_id, 1, 1)
        s3.door.close()
        saved = harness.save(run_id, 3, "first")
        after = harness.forward_backward(run_id, 4, TOKENS)
        train(harness, other, 1, 4)  # snapshots are due, and fail
        for job in (saved, after):
            assert not harness.queue.find(tenant, job.id).is_finished
        s3.door.open()
        harness.result(saved)
        harness.result(after)
        assert record_of(harness, saved).place in BlobStore(s3.url).list_places()
        train(harness, other, 9, 1)
        eventually(lambda: harness.run(other).snapshot is not None)

    def test_loads_samples_and_restored_models_wait(
        self, harness: WorkerHarness, s3: S3Bucket
    ) -> None:
        harness.start()
        tenant = harness.tenant()
        session = harness.session(tenant)
        run_id = harness.model(tenant, session)
        train(harness, run_id, 1, 1)
        saved = harness.save(run_id, 3, "first")
        harness.result(saved)
        harness.stop()
        place = record_of(harness, saved).place
        s3.door.close()
        harness.home = Home(harness.home.root / "other")
        harness.start()
        sampler = harness.sampler(tenant, session, saved.id)
        base_sampler = harness.sampler(tenant, session)
        sample = harness.sample(sampler, 0)
        fresh = harness.model(tenant, session, 1)
        load = harness.load(fresh, 1, saved.id, place=place)
        step = harness.optim_step(run_id, 4)
        assert harness.result(harness.sample(base_sampler, 0))
        for job in (sample, load, step):
            assert not harness.queue.find(tenant, job.id).is_finished
        s3.door.open()
        for job in (sample, load, step):
            harness.result(job)

    def test_stopped_worker_leaves_waiting_work_to_the_next(
        self, harness: WorkerHarness, s3: S3Bucket
    ) -> None:
        harness.start()
        tenant = harness.tenant()
        session = harness.session(tenant)
        run_id = harness.model(tenant, session)
        train(harness, run_id, 1, 1)
        s3.door.close()
        saved = harness.save(run_id, 3, "first")
        eventually(lambda: harness.queue.find(tenant, saved.id).state == JobState.RUNNING)
        harness.stop()
        job = harness.queue.find(tenant, saved.id)
        assert (job.state, job.attempts) == (JobState.QUEUED, 0)
        s3.door.open()
        harness.start()
        harness.result(saved)
