"""Resident models stay within their memory budget and are restored bit-identically."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.jobs.conftest import BASE_MODEL, WorkerHarness
from tests.integration.jobs.test_worker import TOKENS, train
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import AdapterSpec, WriteSnapshot
from tinkex.jobs.snapshots import SnapshotPolicy
from tinkex.store.records import RunState
from tinkex.wire.proto import decode_forward_backward_output

SPEC = AdapterSpec(base_model=BASE_MODEL, rank=8, seed=1)
SIZE = FakeEngine([BASE_MODEL]).training_bytes(SPEC)


class CountingEngine(FakeEngine):
    """An engine with memory for a number of adapters; records the maximum in memory."""

    def __init__(self, num_adapters: int) -> None:
        super().__init__([BASE_MODEL], max_adapter_bytes=num_adapters * SIZE)
        self.most = 0
        self.num_snapshots = 0

    def create(self, adapter_id: str, spec: AdapterSpec) -> None:
        super().create(adapter_id, spec)
        self.most = max(self.most, len(self._adapters))

    def restore(self, adapter_id: str, spec: AdapterSpec, directory: Path) -> None:
        super().restore(adapter_id, spec, directory)
        self.most = max(self.most, len(self._adapters))

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        self.num_snapshots += 1
        return super().snapshot(adapter_id)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WorkerHarness]:
    # Only evictions and the end of the worker write snapshots.
    worker_harness = WorkerHarness(
        tmp_path, snapshots=SnapshotPolicy(max_changes=10_000, max_seconds=1e9)
    )
    yield worker_harness
    worker_harness.close()


def models(harness: WorkerHarness, count: int) -> list[str]:
    tenant = harness.tenant()
    session = harness.session(tenant)
    return [harness.model(tenant, session, number) for number in range(count)]


def test_evicted_models_train_bit_identically(harness: WorkerHarness) -> None:
    engine = CountingEngine(2)
    harness.start(engine)
    many = models(harness, 5)
    losses: dict[str, list[float]] = {run_id: [] for run_id in many}
    for number in range(3):
        for run_id in many:
            losses[run_id] += train(harness, run_id, 1 + 2 * number, 1)
    assert engine.most == 2
    assert engine.num_snapshots > 0
    harness.stop()
    harness.start(CountingEngine(8))
    (alone,) = models(harness, 1)
    expected = train(harness, alone, 1, 3)
    assert all(found == expected for found in losses.values())


def test_untrained_model_is_not_written(harness: WorkerHarness) -> None:
    engine = CountingEngine(2)
    harness.start(engine)
    many = models(harness, 6)
    # Each one is restored from its seed and evicted again.
    for run_id in many:
        harness.result(harness.save(run_id, 1, "start"))
    harness.stop()
    assert engine.most == 2
    assert engine.num_snapshots == 0
    assert list(harness.home.snapshots.iterdir()) == []
    harness.start(CountingEngine(8))
    (fresh,) = models(harness, 1)
    expected = train(harness, fresh, 1, 2)
    assert [train(harness, run_id, 2, 2) for run_id in many] == [expected] * 6


def test_models_of_one_batch_over_budget_run_in_sequence(harness: WorkerHarness) -> None:
    engine = CountingEngine(2)
    many = models(harness, 5)
    passes = [harness.forward_backward(run_id, 1, TOKENS) for run_id in many]
    steps = [harness.optim_step(run_id, 2) for run_id in many]
    harness.start(engine)
    outputs = [decode_forward_backward_output(harness.result(job)) for job in passes]
    assert len({output.metrics["loss:sum"] for output in outputs}) == 1
    for job in steps:
        harness.result(job)
    assert engine.most == 2


def test_adapter_larger_than_budget_is_refused(harness: WorkerHarness) -> None:
    engine = FakeEngine([BASE_MODEL], max_adapter_bytes=SIZE - 1)
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    step = harness.optim_step(run_id, 1)
    harness.start(engine)
    error = harness.outcome(step).job.error
    assert error is not None
    assert "could not be created" in error
    assert harness.run(run_id).state == RunState.FAILED


def test_budget_error_names_rank_and_sizes() -> None:
    engine = FakeEngine([BASE_MODEL], max_adapter_bytes=SIZE - 1)
    with pytest.raises(ValueError, match=f"rank 8 .* needs {SIZE:,} bytes.* has {SIZE - 1:,} "):
        engine.create("a", SPEC)


class FullDisk(CountingEngine):
    """An engine whose snapshots fail."""

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        def write(directory: Path) -> None:
            raise OSError(28, "No space left on device")

        return write


def test_model_stays_resident_when_snapshot_fails(harness: WorkerHarness) -> None:
    harness.start(FullDisk(1))
    one, other = models(harness, 2)
    losses = train(harness, one, 1, 2)
    refused = harness.outcome(harness.forward_backward(other, 1, TOKENS)).job
    assert refused.error is not None
    assert "others cannot be written to disk" in refused.error
    assert refused.category == "server"
    assert train(harness, one, 5, 1)[0] < losses[-1]
