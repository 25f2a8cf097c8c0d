"""A long pass runs a micro-batch at a time: other work runs between, and the result is the same."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.integration.jobs.conftest import BASE_MODEL, House
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import Pass, PassOutcome, PassSteps
from tinkex.store.records import JobRecord, JobState
from tinkex.wire.proto import decode_forward_backward_output

LONG = [(7 * place) % 200 + 3 for place in range(101)]
SHORT = [5, 6, 7]
STEP_TOKENS = 10


class Stepped(FakeEngine):
    """Waits for permission before every micro-batch of a long pass."""

    def __init__(self) -> None:
        super().__init__([BASE_MODEL], step_tokens=STEP_TOKENS)
        self.permits = threading.Semaphore(0)
        self.began = threading.Event()
        self.num_steps = 0

    def _take_time(self) -> None:
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
def engine(house: House) -> Stepped:
    made = Stepped()
    house.start(made)
    return made


def new_model(house: House, tenant_name: str, number: int = 0) -> str:
    tenant = house.tenant(tenant_name)
    return house.model(tenant, house.session(tenant), number)


def weights_after(house: House, run_id: str, seq: int) -> dict[str, bytes]:
    """A checkpoint's files after one optimizer step."""
    house.result(house.optim_step(run_id, seq))
    saved = house.save(run_id, seq + 1, "end")
    house.result(saved)
    return {
        path.name: path.read_bytes()
        for path in house.home.checkpoint_directory(saved.id).iterdir()
        if path.name.endswith((".safetensors", ".npz"))
    }


def test_other_tenants_work_runs_between_the_steps_of_a_long_pass(
    house: House, engine: Stepped
) -> None:
    heavy, light = new_model(house, "heavy"), new_model(house, "light")
    long = house.forward_backward(heavy, 1, LONG)
    assert engine.began.wait(60)
    short = house.forward_backward(light, 1, SHORT)
    step = house.optim_step(light, 2)
    tenant = house.tenant("third")
    sample = house.sample(house.sampler(tenant, house.session(tenant)), 1)
    # Only the step that runs now ends; what follows does not.
    engine.permits.release()
    for job in (short, step, sample):
        house.result(job)
    assert engine.num_steps == 1
    assert house.queue.find(long.tenant_id, long.id).state == JobState.RUNNING
    engine.permits.release(100)
    house.result(long)
    assert engine.num_steps == len(LONG) // STEP_TOKENS


def test_a_sample_waits_for_one_step_of_a_long_pass_and_not_for_two(
    house: House, engine: Stepped
) -> None:
    long = house.forward_backward(new_model(house, "heavy"), 1, LONG)
    assert engine.began.wait(60)
    tenant = house.tenant("light")
    sample = house.sample(house.sampler(tenant, house.session(tenant)), 1)
    engine.permits.release()
    house.result(sample)
    assert engine.num_steps == 1
    engine.permits.release(100)
    house.result(long)


def test_a_tenants_other_model_runs_between_the_steps_too(house: House, engine: Stepped) -> None:
    tenant = house.tenant()
    session = house.session(tenant)
    first, second = house.model(tenant, session, 0), house.model(tenant, session, 1)
    long = house.forward_backward(first, 1, LONG)
    assert engine.began.wait(60)
    short = house.forward_backward(second, 1, SHORT)
    engine.permits.release(2)
    house.result(short)
    assert not house.queue.find(tenant, long.id).is_finished
    engine.permits.release(100)
    house.result(long)


def test_an_interrupted_pass_gives_the_same_bits(tmp_path: Path) -> None:
    found = []
    for name in ("calm", "busy"):
        (tmp_path / name).mkdir()
        house = House(tmp_path / name)
        try:
            engine = Stepped()
            house.start(engine)
            run_id = new_model(house, "heavy")
            long = house.forward_backward(run_id, 1, LONG)
            if name == "busy":
                assert engine.began.wait(60)
                light = new_model(house, "light")
                short = house.forward_backward(light, 1, SHORT)
                engine.permits.release(len(LONG) // STEP_TOKENS - 1)
                house.result(short)
                assert not house.queue.find(long.tenant_id, long.id).is_finished
            engine.permits.release(100)
            found.append((house.result(long), weights_after(house, run_id, 2)))
        finally:
            house.close()
    assert found[0] == found[1]


def test_a_cancelled_pass_stops_at_its_next_step_and_changes_nothing(
    house: House, engine: Stepped
) -> None:
    run_id, other = new_model(house, "heavy"), new_model(house, "other")
    long = house.forward_backward(run_id, 1, LONG)
    assert engine.began.wait(60)
    waiting = house.forward_backward(run_id, 2, LONG)
    for job in (waiting, long):
        assert house.queue.cancel(job.tenant_id, job.id).result()
    engine.permits.release()
    for job in (long, waiting):
        error = house.outcome(job).job.error
        assert error == "the request was cancelled"
    assert engine.num_steps == 1
    # As if it had never been asked for.
    engine.permits.release(100)
    house.result(house.forward_backward(run_id, 3, SHORT))
    house.result(house.forward_backward(other, 1, SHORT))
    assert weights_after(house, run_id, 4) == weights_after(house, other, 2)
    assert house.run(run_id).applied == house.run(other).applied


def test_a_pass_that_was_cancelled_while_no_worker_ran_never_runs(house: House) -> None:
    run_id = new_model(house, "heavy")
    long = house.forward_backward(run_id, 1, LONG)
    assert house.queue.cancel(long.tenant_id, long.id).result()
    engine = Stepped()
    house.start(engine)
    assert house.outcome(long).job.error == "the request was cancelled"
    assert engine.num_steps == 0


def test_a_stopping_worker_ends_after_one_step_and_the_pass_runs_again(house: House) -> None:
    engine = Stepped()
    house.start(engine)
    run_id = new_model(house, "heavy")
    long = house.forward_backward(run_id, 1, LONG)
    assert engine.began.wait(60)
    assert house.worker is not None
    house.worker.stop()
    engine.permits.release()
    house.stop()
    assert engine.num_steps == 1
    found = house.queue.find(long.tenant_id, long.id)
    assert (found.state, found.attempts) == (JobState.QUEUED, 0)
    again = FakeEngine([BASE_MODEL], step_tokens=STEP_TOKENS)
    house.start(again)
    calm = new_model(house, "calm")
    undisturbed = house.forward_backward(calm, 1, LONG)
    assert metrics(house, long) == metrics(house, undisturbed)
    assert weights_after(house, run_id, 2) == weights_after(house, calm, 2)


def metrics(house: House, job: JobRecord) -> dict[str, float]:
    return dict(decode_forward_backward_output(house.result(job)).metrics)
