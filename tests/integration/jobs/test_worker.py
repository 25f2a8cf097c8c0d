"""The worker keeps every promise once, in order, whatever happens between."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from tests.integration.jobs.conftest import BASE_MODEL, House, count
from tinkex import types
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import WriteSnapshot
from tinkex.jobs.fair_queue import BatchLimits
from tinkex.jobs.job_types import JobKind
from tinkex.jobs.snapshots import SnapshotPolicy
from tinkex.store.records import JobRecord, NewJob
from tinkex.store.schema import checkpoints, jobs, steps, usage
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import (
    decode_forward_backward_output,
    decode_sample_response,
    encode_forward_backward_request,
)

TOKENS = [5, 6, 7, 8, 9, 10]


def train(house: House, run_id: str, first: int, num_steps: int) -> list[float]:
    """Losses of so many steps; each is a pass and an optimizer step."""
    losses = []
    for index in range(num_steps):
        passed = house.forward_backward(run_id, first + 2 * index, TOKENS)
        house.optim_step(run_id, first + 2 * index + 1)
        losses.append(decode_forward_backward_output(house.result(passed)).metrics["loss:sum"])
    return losses


def test_training_lowers_the_loss(house: House) -> None:
    house.start()
    tenant = house.tenant()
    run_id = house.model(tenant, house.session(tenant))
    losses = train(house, run_id, 1, 8)
    assert losses[-1] < losses[0] - 1.0
    assert losses == sorted(losses, reverse=True)


def test_operations_run_in_the_order_of_their_numbers(house: House) -> None:
    tenant = house.tenant()
    run_id = house.model(tenant, house.session(tenant))
    last = house.save(run_id, 4, "end")
    house.optim_step(run_id, 3)
    house.forward_backward(run_id, 2, TOKENS)
    house.forward_backward(run_id, 1, TOKENS)
    house.start()
    house.result(last)
    query = sa.select(steps.c.kind).where(steps.c.run_id == run_id).order_by(steps.c.no)
    kinds = house.read(lambda db: list(db.scalars(query)))
    assert kinds == [
        JobKind.CREATE_MODEL,
        JobKind.FORWARD_BACKWARD,
        JobKind.FORWARD_BACKWARD,
        JobKind.OPTIM_STEP,
        JobKind.SAVE_WEIGHTS,
    ]


def test_a_missing_number_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    house = House(tmp_path, turns=BatchLimits(gap_seconds=0.2))
    try:
        house.start()
        tenant = house.tenant()
        run_id = house.model(tenant, house.session(tenant))
        assert house.outcome(house.optim_step(run_id, 5)).job.error is None
        late = house.forward_backward(run_id, 2, TOKENS)
        assert house.outcome(late).job.error is None
    finally:
        house.close()


def test_the_same_key_is_the_same_promise(house: House) -> None:
    house.start()
    tenant = house.tenant()
    run_id = house.model(tenant, house.session(tenant))
    first = house.optim_step(run_id, 1)
    again = house.optim_step(run_id, 1)
    assert again.id == first.id
    assert house.result(first) == house.result(again)
    assert house.run(run_id).applied == 2


def test_a_number_used_for_something_else_is_refused(house: House) -> None:
    house.start()
    tenant = house.tenant()
    run_id = house.model(tenant, house.session(tenant))
    house.optim_step(run_id, 1)
    with pytest.raises(Exception, match="used for optim_step before"):
        house.save(run_id, 1, "other")


@pytest.mark.parametrize("max_changes", [1, 3, 1000])
def test_a_new_worker_goes_on_exactly_where_the_old_one_was(
    tmp_path: Path, max_changes: int
) -> None:
    policy = SnapshotPolicy(max_changes=max_changes)
    undisturbed = _losses(tmp_path / "calm", policy, stops=())
    disturbed = _losses(tmp_path / "wild", policy, stops=(2, 3, 6))
    assert disturbed == undisturbed


def _losses(root: Path, policy: SnapshotPolicy, stops: tuple[int, ...]) -> list[float]:
    root.mkdir()
    house = House(root, snapshots=policy)
    try:
        house.start()
        tenant = house.tenant()
        run_id = house.model(tenant, house.session(tenant))
        losses = []
        for step in range(8):
            if step in stops:
                house.stop()
                house.start()
            losses += train(house, run_id, 1 + 2 * step, 1)
        return losses
    finally:
        house.close()


class FullDisk(FakeEngine):
    """Cannot write a snapshot, like a worker that dies before its first."""

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        def write(directory: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        return write


def test_replay_alone_brings_a_model_back(house: House) -> None:
    house.start(FullDisk([BASE_MODEL]))
    tenant = house.tenant()
    run_id = house.model(tenant, house.session(tenant))
    losses = train(house, run_id, 1, 4)
    house.stop()
    assert house.run(run_id).snapshot is None
    house.start()
    again = house.model(tenant, house.session(tenant))
    assert train(house, run_id, 9, 1)[0] < losses[-1]
    assert train(house, again, 1, 5)[:4] == losses
    assert train(house, again, 11, 2) == train(house, run_id, 11, 2)


class NoRoom(FakeEngine):
    """Finds the disk full when it saves."""

    def save(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        (directory / "half").write_bytes(b"written before there was no more room")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_save_on_a_full_disk_fails_in_a_sentence_and_leaves_nothing(house: House) -> None:
    house.start(NoRoom([BASE_MODEL]))
    tenant = house.tenant()
    run_id = house.model(tenant, house.session(tenant))
    failed = house.outcome(house.save(run_id, 1, "x")).job
    assert failed.category == "server"
    assert "No space left" in (failed.error or "")
    assert list(house.home.checkpoints.iterdir()) == []
    assert train(house, run_id, 2, 1)


def test_a_user_mistake_fails_its_promise_alone(house: House) -> None:
    house.start()
    alice, bob = house.tenant("alice"), house.tenant("bob")
    mine = house.model(alice, house.session(alice))
    theirs = house.model(bob, house.session(bob))
    wrong = house.forward_backward(mine, 1, [1, 2, 10**6])
    right = house.forward_backward(theirs, 1, TOKENS)
    failed = house.outcome(wrong).job
    assert failed.category == "user"
    assert "1000000" in (failed.error or "")
    assert house.result(right)
    assert house.run(mine).applied == 1


def test_a_model_that_cannot_be_made_fails_what_follows(house: House) -> None:
    house.start(FakeEngine(["another/model"]))
    tenant = house.tenant()
    run_id = house.model(tenant, house.session(tenant))
    failed = house.outcome(house.optim_step(run_id, 1)).job
    assert failed.category == "user"
    assert house.run(run_id).state == "failed"


def test_save_then_load_continues_bit_for_bit(house: House) -> None:
    house.start()
    tenant = house.tenant()
    session = house.session(tenant)
    first = house.model(tenant, session, 0)
    train(house, first, 1, 3)
    saved = house.save(first, 7, "mid")
    path = msgspec.json.decode(house.result(saved))["path"]
    assert path == f"tinker://{first}/weights/mid"
    expected = train(house, first, 8, 3)
    second = house.model(tenant, session, 1)
    house.result(house.load(second, 1, saved.id, path))
    assert train(house, second, 2, 3) == expected


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_with_one_flipped_bit_is_neither_loaded_nor_sampled_from(house: House) -> None:
    house.start()
    tenant = house.tenant()
    session = house.session(tenant)
    first = house.model(tenant, session, 0)
    train(house, first, 1, 1)
    saved = house.save(first, 3, "mid")
    path = msgspec.json.decode(house.result(saved))["path"]
    request = types.SaveWeightsForSamplerRequest(
        model_id=first, seq_id=4, sampling_session_seq_id=7
    )
    drawn = house.op(first, 4, JobKind.SAVE_WEIGHTS_FOR_SAMPLER, encode_json(request))
    sampler_id = msgspec.json.decode(house.result(drawn))["sampling_session_id"]
    flip_last_bit(house.home.checkpoint_directory(saved.id) / "optimizer.safetensors")
    flip_last_bit(house.home.checkpoint_directory(drawn.id) / "adapter_model.safetensors")

    second = house.model(tenant, session, 1)
    loading = house.outcome(house.load(second, 1, saved.id, path)).job
    sampling = house.outcome(house.sample(sampler_id, 0)).job

    assert (loading.category, sampling.category) == ("server", "server")
    assert f"checkpoint {path} is damaged" in (loading.error or "")
    assert "'optimizer.safetensors'" in (loading.error or "")
    assert f"checkpoint tinker://{first}/sampler_weights/" in (sampling.error or "")
    # The model that could not load goes on as it was.
    assert train(house, second, 2, 1)


def test_a_batch_in_which_some_examples_have_weights_counts_the_others_fully(house: House) -> None:
    house.start()
    tenant = house.tenant()
    run_id = house.model(tenant, house.session(tenant))
    text = types.ModelInput.from_ints([5, 6])
    data = [
        types.Datum(text, {"target_tokens": [6, 7], "weights": [0.25, 0.0]}),
        types.Datum(text, {"target_tokens": [6, 7]}),
    ]
    work = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(work, run_id, 1)
    body = encode_forward_backward_request(request, False)
    job = house.op(run_id, 1, JobKind.FORWARD_BACKWARD, body, is_proto=True)
    output = decode_forward_backward_output(house.result(job))
    [first, second] = [one["logprobs"].tolist() for one in output.loss_fn_outputs]
    expected = -0.25 * first[0] - sum(second)
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    is_pass = steps.c.kind == JobKind.FORWARD_BACKWARD
    query = sa.select(steps.c.metrics).where(steps.c.run_id == run_id, is_pass)
    [metrics] = house.read(lambda db: list(db.scalars(query)))
    assert metrics["weight:sum"] == 2.25


def test_a_taken_name_is_refused_unless_it_may_be_replaced(house: House) -> None:
    house.start()
    tenant = house.tenant()
    run_id = house.model(tenant, house.session(tenant))
    house.result(house.save(run_id, 1, "x"))
    assert "exists" in (house.outcome(house.save(run_id, 2, "x")).job.error or "")
    house.result(house.save(run_id, 3, "x", overwrite=True))
    alive = sa.select(sa.func.count()).where(checkpoints.c.deleted_at.is_(None))
    assert count(house.database, alive) == 1


def test_unnamed_sampler_weights_open_a_sampling_session(house: House) -> None:
    house.start()
    tenant = house.tenant()
    session = house.session(tenant)
    run_id = house.model(tenant, session)
    request = types.SaveWeightsForSamplerRequest(
        model_id=run_id, seq_id=1, sampling_session_seq_id=7
    )
    saved = house.op(run_id, 1, JobKind.SAVE_WEIGHTS_FOR_SAMPLER, encode_json(request))
    sampler_id = msgspec.json.decode(house.result(saved))["sampling_session_id"]
    assert sampler_id == f"{session}:sample:7"
    response = decode_sample_response(house.result(house.sample(sampler_id, 0)))
    assert len(response.sequences[0].tokens) > 0


def test_the_same_seed_gives_the_same_sample(house: House) -> None:
    house.start()
    tenant = house.tenant()
    sampler_id = house.sampler(tenant, house.session(tenant))
    drawn = [
        decode_sample_response(house.result(house.sample(sampler_id, number, seed=11)))
        for number in range(3)
    ]
    assert drawn[0].sequences[0].tokens == drawn[1].sequences[0].tokens
    assert drawn[1].sequences[0].tokens == drawn[2].sequences[0].tokens


def test_a_cancelled_sample_is_over_at_once(house: House) -> None:
    house.start(FakeEngine([BASE_MODEL], seconds_per_op=0.05))
    tenant = house.tenant()
    sampler_id = house.sampler(tenant, house.session(tenant))
    drawn = [house.sample(sampler_id, number) for number in range(12)]
    assert house.queue.cancel(tenant, drawn[-1].id).result() is True
    assert "cancelled" in (house.outcome(drawn[-1]).job.error or "")
    for job in drawn[:-1]:
        house.result(job)
    assert house.queue.cancel(tenant, drawn[0].id).result() is False


def test_work_is_counted(house: House) -> None:
    house.start()
    tenant = house.tenant()
    run_id = house.model(tenant, house.session(tenant))
    train(house, run_id, 1, 2)
    query = sa.select(sa.func.sum(usage.c.amount)).where(usage.c.kind == "training")
    assert count(house.database, query) == 2 * (len(TOKENS) - 1)


def test_a_job_that_kills_the_worker_is_given_up(house: House) -> None:
    tenant = house.tenant()
    run_id = house.model(tenant, house.session(tenant))
    job = house.optim_step(run_id, 1)
    house.database.write(
        lambda db: db.execute(
            sa.update(jobs).where(jobs.c.id == job.id).values(state="running", attempts=3)
        )
    )
    house.start()
    failed = house.outcome(job).job
    assert failed.category == "server"
    assert "given up" in (failed.error or "")


def test_a_model_leaves_memory_when_its_session_is_over(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.jobs.worker.MAINTENANCE_SECONDS", 0.05)
    house.start()
    tenant = house.tenant()
    session = house.session(tenant)
    run_id = house.model(tenant, session)
    losses = train(house, run_id, 1, 2)
    house.database.write(lambda db: db.execute(sa.text("UPDATE sessions SET expired_at = 1.0")))
    until = time.monotonic() + 60
    while house.engine.has_adapter(run_id) and time.monotonic() < until:
        time.sleep(0.01)
    assert not house.engine.has_adapter(run_id)
    assert train(house, run_id, 5, 1)[0] < losses[-1]


def test_weights_that_others_put_in_the_place_of_published_ones_stay_theirs(house: House) -> None:
    owner, other = house.tenant("alice"), house.tenant("bob")
    house.start()
    run_id = house.model(owner, house.session(owner))
    house.result(house.save(run_id, 1, "published"))
    house.stop()
    path = f"tinker://{run_id}/weights/published"
    mine, theirs = (_sample_from(house, tenant, path) for tenant in (owner, other))
    # Promised while the name stood for something else.
    house.database.write(
        lambda db: db.execute(sa.text("UPDATE checkpoints SET created_at = created_at + 60"))
    )
    house.start()
    house.result(mine)
    assert "were deleted" in (house.outcome(theirs).job.error or "")


def _sample_from(house: House, tenant: str, path: str) -> JobRecord:
    request = types.SampleRequest(
        prompt=types.ModelInput.from_ints([1, 2, 3]),
        sampling_params=types.SamplingParams(max_tokens=4),
        model_path=path,
    )
    new = NewJob(
        id="",
        tenant_id=tenant,
        session_id="",
        kind=JobKind.SAMPLE,
        key=None,
        position=0,
        payload=encode_json(request),
        num_sequences=1,
    )
    return house.queue.submit(new).result()
