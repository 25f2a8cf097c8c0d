"""Preemption: other jobs run between the micro-batches of a long pass; results are unchanged."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.integration.jobs.conftest import BASE_MODEL, WorkerHarness
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import Pass, PassOutcome, PassSteps
from tinkex.store.records import JobRecord, JobState
from tinkex.wire.proto import decode_forward_backward_output

LONG = [(7 * place) % 200 + 3 for place in range(101)]
SHORT = [5, 6, 7]
STEP_TOKENS = 10


class GatedEngine(FakeEngine):
    """Waits for permission before every micro-batch of a long pass."""

    def __init__(self) -> None:
        super().__init__([BASE_MODEL], step_tokens=STEP_TOKENS)
        self.permits = threading.Semaphore(0)
        self.began = threading.Event()
        self.num_steps = 0

    def _sleep_per_op(self) -> None:
        if self._is_long:
            self.began.set()
            assert self.permits.acquire(timeout=60)
            self.num_steps += 1

    def _run_passes(self, passes: list[Pass]) -> PassSteps:  # type: ignore[override]
        is_long = sum(each.request.data[0].model_input.length for each in passes) > STEP_TOKENS
        steps = super()._run_passes(passes)
        while True:
            self._is_long = is_long
            try:
                num_tokens = next(steps)
            except StopIteration as end:
                outcomes: list[PassOutcome] = end.value
                return outcomes
            finally:
                self._is_long = False
            yield num_tokens

    _is_long = False


@pytest.fixture
def engine(harness: WorkerHarness) -> GatedEngine:
    gated_engine = GatedEngine()
    harness.start(gated_engine)
    return gated_engine


def new_model(harness: WorkerHarness, tenant_name: str, number: int = 0) -> str:
    tenant = harness.tenant(tenant_name)
    return harness.model(tenant, harness.session(tenant), number)


def weights_after(harness: WorkerHarness, run_id: str, seq: int) -> dict[str, bytes]:
    """Return the files of a checkpoint after one optimizer step."""
    harness.result(harness.optim_step(run_id, seq))
    saved = harness.save(run_id, seq + 1, "end")
    harness.result(saved)
    return {
        path.name: path.read_bytes()
        for path in harness.home.checkpoint_directory(saved.id).iterdir()
        if path.name.endswith((".safetensors", ".npz"))
    }


def test_other_tenants_jobs_run_between_micro_batches(
    harness: WorkerHarness, engine: GatedEngine
) -> None:
    heavy, light = new_model(harness, "heavy"), new_model(harness, "light")
    long = harness.forward_backward(heavy, 1, LONG)
    assert engine.began.wait(60)
    short = harness.forward_backward(light, 1, SHORT)
    step = harness.optim_step(light, 2)
    tenant = harness.tenant("third")
    sample = harness.sample(harness.sampler(tenant, harness.session(tenant)), 1)
    # Only the current micro-batch finishes.
    engine.permits.release()
    for job in (short, step, sample):
        harness.result(job)
    assert engine.num_steps == 1
    assert harness.queue.find(long.tenant_id, long.id).state == JobState.RUNNING
    engine.permits.release(100)
    harness.result(long)
    assert engine.num_steps == len(LONG) // STEP_TOKENS


def test_sample_waits_for_at_most_one_micro_batch(
    harness: WorkerHarness, engine: GatedEngine
) -> None:
    long = harness.forward_backward(new_model(harness, "heavy"), 1, LONG)
    assert engine.began.wait(60)
    tenant = harness.tenant("light")
    sample = harness.sample(harness.sampler(tenant, harness.session(tenant)), 1)
    engine.permits.release()
    harness.result(sample)
    assert engine.num_steps == 1
    engine.permits.release(100)
    harness.result(long)


def test_same_tenants_other_model_runs_between_micro_batches(
    harness: WorkerHarness, engine: GatedEngine
) -> None:
    tenant = harness.tenant()
    session = harness.session(tenant)
    first, second = harness.model(tenant, session, 0), harness.model(tenant, session, 1)
    long = harness.forward_backward(first, 1, LONG)
    assert engine.began.wait(60)
    short = harness.forward_backward(second, 1, SHORT)
    engine.permits.release(2)
    harness.result(short)
    assert not harness.queue.find(tenant, long.id).is_finished
    engine.permits.release(100)
    harness.result(long)


def test_preempted_pass_is_bit_identical(tmp_path: Path) -> None:
    weights = []
    for name in ("calm", "busy"):
        (tmp_path / name).mkdir()
        harness = WorkerHarness(tmp_path / name)
        try:
            engine = GatedEngine()
            harness.start(engine)
            run_id = new_model(harness, "heavy")
            long = harness.forward_backward(run_id, 1, LONG)
            if name == "busy":
                assert engine.began.wait(60)
                light = new_model(harness, "light")
                short = harness.forward_backward(light, 1, SHORT)
                engine.permits.release(len(LONG) // STEP_TOKENS - 1)
                harness.result(short)
                assert not harness.queue.find(long.tenant_id, long.id).is_finished
            engine.permits.release(100)
            weights.append((harness.result(long), weights_after(harness, run_id, 2)))
        finally:
            harness.close()
    assert weights[0] == weights[1]


def test_cancelled_pass_stops_at_next_micro_batch(
    harness: WorkerHarness, engine: GatedEngine
) -> None:
    run_id, other = new_model(harness, "heavy"), new_model(harness, "other")
    long = harness.forward_backward(run_id, 1, LONG)
    assert engine.began.wait(60)
    waiting = harness.forward_backward(run_id, 2, LONG)
    for job in (waiting, long):
        assert harness.queue.cancel(job.tenant_id, job.id).result()
    engine.permits.release()
    for job in (long, waiting):
        error = harness.outcome(job).job.error
        assert error == "the request was cancelled"
    assert engine.num_steps == 1
    # The model is unchanged.
    engine.permits.release(100)
    harness.result(harness.forward_backward(run_id, 3, SHORT))
    harness.result(harness.forward_backward(other, 1, SHORT))
    assert weights_after(harness, run_id, 4) == weights_after(harness, other, 2)
    assert harness.run(run_id).applied == harness.run(other).applied


def test_pass_cancelled_without_worker_never_runs(harness: WorkerHarness) -> None:
    run_id = new_model(harness, "heavy")
    long = harness.forward_backward(run_id, 1, LONG)
    assert harness.queue.cancel(long.tenant_id, long.id).result()
    engine = GatedEngine()
    harness.start(engine)
    assert harness.outcome(long).job.error == "the request was cancelled"
    assert engine.num_steps == 0


def test_worker_stop_requeues_pass_after_current_micro_batch(
    harness: WorkerHarness,
) -> None:
    engine = GatedEngine()
    harness.start(engine)
    run_id = new_model(harness, "heavy")
    long = harness.forward_backward(run_id, 1, LONG)
    assert engine.began.wait(60)
    assert harness.worker is not None
    harness.worker.stop()
    engine.permits.release()
    harness.stop()
    assert engine.num_steps == 1
    job = harness.queue.find(long.tenant_id, long.id)
    assert (job.state, job.attempts) == (JobState.QUEUED, 0)
    again = FakeEngine([BASE_MODEL], step_tokens=STEP_TOKENS)
    harness.start(again)
    uninterrupted_run = new_model(harness, "calm")
    uninterrupted = harness.forward_backward(uninterrupted_run, 1, LONG)
    assert metrics(harness, long) == metrics(harness, uninterrupted)
    assert weights_after(harness, run_id, 2) == weights_after(harness, uninterrupted_run, 2)


def metrics(harness: WorkerHarness, job: JobRecord) -> dict[str, float]:
    return dict(decode_forward_backward_output(harness.result(job)).metrics)
