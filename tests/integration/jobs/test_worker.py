"""The worker runs every job exactly once and in order, also after restarts."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from tests.integration.jobs.conftest import BASE_MODEL, WorkerHarness, count
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


def train(harness: WorkerHarness, run_id: str, first: int, num_steps: int) -> list[float]:
    """Return the losses of `count` steps; each is a pass and an optimizer step."""
    losses = []
    for index in range(num_steps):
        passed = harness.forward_backward(run_id, first + 2 * index, TOKENS)
        harness.optim_step(run_id, first + 2 * index + 1)
        losses.append(decode_forward_backward_output(harness.result(passed)).metrics["loss:sum"])
    return losses


def test_training_lowers_the_loss(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    losses = train(harness, run_id, 1, 8)
    assert losses[-1] < losses[0] - 1.0
    assert losses == sorted(losses, reverse=True)


def test_operations_run_in_seq_id_order(harness: WorkerHarness) -> None:
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    last = harness.save(run_id, 4, "end")
    harness.optim_step(run_id, 3)
    harness.forward_backward(run_id, 2, TOKENS)
    harness.forward_backward(run_id, 1, TOKENS)
    harness.start()
    harness.result(last)
    query = sa.select(steps.c.kind).where(steps.c.run_id == run_id).order_by(steps.c.no)
    kinds = harness.read(lambda db: list(db.scalars(query)))
    assert kinds == [
        JobKind.CREATE_MODEL,
        JobKind.FORWARD_BACKWARD,
        JobKind.FORWARD_BACKWARD,
        JobKind.OPTIM_STEP,
        JobKind.SAVE_WEIGHTS,
    ]


def test_missing_seq_id_is_skipped_after_timeout(tmp_path: Path) -> None:
    harness = WorkerHarness(tmp_path, batch_limits=BatchLimits(gap_seconds=0.2))
    try:
        harness.start()
        tenant = harness.tenant()
        run_id = harness.model(tenant, harness.session(tenant))
        assert harness.outcome(harness.optim_step(run_id, 5)).job.error is None
        late = harness.forward_backward(run_id, 2, TOKENS)
        assert harness.outcome(late).job.error is None
    finally:
        harness.close()


def test_same_idempotency_key_returns_same_job(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    first = harness.optim_step(run_id, 1)
    again = harness.optim_step(run_id, 1)
    assert again.id == first.id
    assert harness.result(first) == harness.result(again)
    assert harness.run(run_id).applied == 2


def test_reused_seq_id_is_rejected(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    harness.optim_step(run_id, 1)
    with pytest.raises(Exception, match="used for optim_step before"):
        harness.save(run_id, 1, "other")


@pytest.mark.parametrize("max_changes", [1, 3, 1000])
def test_new_worker_resumes_exactly(tmp_path: Path, max_changes: int) -> None:
    policy = SnapshotPolicy(max_changes=max_changes)
    uninterrupted = _losses(tmp_path / "calm", policy, stops=())
    interrupted = _losses(tmp_path / "wild", policy, stops=(2, 3, 6))
    assert interrupted == uninterrupted


def _losses(root: Path, policy: SnapshotPolicy, stops: tuple[int, ...]) -> list[float]:
    root.mkdir()
    harness = WorkerHarness(root, snapshots=policy)
    try:
        harness.start()
        tenant = harness.tenant()
        run_id = harness.model(tenant, harness.session(tenant))
        losses = []
        for step in range(8):
            if step in stops:
                harness.stop()
                harness.start()
            losses += train(harness, run_id, 1 + 2 * step, 1)
        return losses
    finally:
        harness.close()


class FailingSnapshotEngine(FakeEngine):
    """An engine whose snapshots fail."""

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        def write(directory: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        return write


def test_model_is_restored_by_replay_only(harness: WorkerHarness) -> None:
    harness.start(FailingSnapshotEngine([BASE_MODEL]))
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    losses = train(harness, run_id, 1, 4)
    harness.stop()
    assert harness.run(run_id).snapshot is None
    harness.start()
    again = harness.model(tenant, harness.session(tenant))
    assert train(harness, run_id, 9, 1)[0] < losses[-1]
    assert train(harness, again, 1, 5)[:4] == losses
    assert train(harness, again, 11, 2) == train(harness, run_id, 11, 2)


class FullDiskEngine(FakeEngine):
    """An engine whose disk is full."""

    def save(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        (directory / "half").write_bytes(b"partial content")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_save_on_full_disk_fails_and_leaves_no_files(
    harness: WorkerHarness,
) -> None:
    harness.start(FullDiskEngine([BASE_MODEL]))
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    failed = harness.outcome(harness.save(run_id, 1, "x")).job
    assert failed.category == "server"
    assert "No space left" in (failed.error or "")
    assert list(harness.home.checkpoints.iterdir()) == []
    assert train(harness, run_id, 2, 1)


def test_user_error_fails_only_its_job(harness: WorkerHarness) -> None:
    harness.start()
    alice, bob = harness.tenant("alice"), harness.tenant("bob")
    alices_model = harness.model(alice, harness.session(alice))
    bobs_model = harness.model(bob, harness.session(bob))
    wrong = harness.forward_backward(alices_model, 1, [1, 2, 10**6])
    right = harness.forward_backward(bobs_model, 1, TOKENS)
    failed = harness.outcome(wrong).job
    assert failed.category == "user"
    assert "1000000" in (failed.error or "")
    assert harness.result(right)
    assert harness.run(alices_model).applied == 1


def test_failed_create_model_fails_following_operations(harness: WorkerHarness) -> None:
    harness.start(FakeEngine(["another/model"]))
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    failed = harness.outcome(harness.optim_step(run_id, 1)).job
    assert failed.category == "user"
    assert harness.run(run_id).state == "failed"


def test_load_after_save_is_bit_identical(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    session = harness.session(tenant)
    first = harness.model(tenant, session, 0)
    train(harness, first, 1, 3)
    saved = harness.save(first, 7, "mid")
    path = msgspec.json.decode(harness.result(saved))["path"]
    assert path == f"tinker://{first}/weights/mid"
    expected = train(harness, first, 8, 3)
    second = harness.model(tenant, session, 1)
    harness.result(harness.load(second, 1, saved.id, path))
    assert train(harness, second, 2, 3) == expected


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)


def test_corrupt_checkpoint_is_neither_loaded_nor_sampled(
    harness: WorkerHarness,
) -> None:
    harness.start()
    tenant = harness.tenant()
    session = harness.session(tenant)
    first = harness.model(tenant, session, 0)
    train(harness, first, 1, 1)
    saved = harness.save(first, 3, "mid")
    path = msgspec.json.decode(harness.result(saved))["path"]
    request = types.SaveWeightsForSamplerRequest(
        model_id=first, seq_id=4, sampling_session_seq_id=7
    )
    sampler_job = harness.op(first, 4, JobKind.SAVE_WEIGHTS_FOR_SAMPLER, encode_json(request))
    sampler_id = msgspec.json.decode(harness.result(sampler_job))["sampling_session_id"]
    flip_last_bit(harness.home.checkpoint_directory(saved.id) / "optimizer.safetensors")
    flip_last_bit(harness.home.checkpoint_directory(sampler_job.id) / "adapter_model.safetensors")

    second = harness.model(tenant, session, 1)
    loading = harness.outcome(harness.load(second, 1, saved.id, path)).job
    sampling = harness.outcome(harness.sample(sampler_id, 0)).job

    assert (loading.category, sampling.category) == ("server", "server")
    assert f"checkpoint {path} is damaged" in (loading.error or "")
    assert "'optimizer.safetensors'" in (loading.error or "")
    assert f"checkpoint tinker://{first}/sampler_weights/" in (sampling.error or "")
    # The failed load leaves the model unchanged.
    assert train(harness, second, 2, 1)


def test_examples_without_weights_have_weight_one(
    harness: WorkerHarness,
) -> None:
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    text = types.ModelInput.from_ints([5, 6])
    data = [
        types.Datum(text, {"target_tokens": [6, 7], "weights": [0.25, 0.0]}),
        types.Datum(text, {"target_tokens": [6, 7]}),
    ]
    work = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(work, run_id, 1)
    body = encode_forward_backward_request(request, False)
    job = harness.op(run_id, 1, JobKind.FORWARD_BACKWARD, body, is_proto=True)
    output = decode_forward_backward_output(harness.result(job))
    [first, second] = [one["logprobs"].tolist() for one in output.loss_fn_outputs]
    expected = -0.25 * first[0] - sum(second)
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    is_pass = steps.c.kind == JobKind.FORWARD_BACKWARD
    query = sa.select(steps.c.metrics).where(steps.c.run_id == run_id, is_pass)
    [metrics] = harness.read(lambda db: list(db.scalars(query)))
    assert metrics["weight:sum"] == 2.25


def test_existing_checkpoint_name_is_rejected_unless_overwrite(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    harness.result(harness.save(run_id, 1, "x"))
    assert "exists" in (harness.outcome(harness.save(run_id, 2, "x")).job.error or "")
    harness.result(harness.save(run_id, 3, "x", overwrite=True))
    alive = sa.select(sa.func.count()).where(checkpoints.c.deleted_at.is_(None))
    assert count(harness.database, alive) == 1


def test_unnamed_sampler_weights_open_a_sampling_session(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    session = harness.session(tenant)
    run_id = harness.model(tenant, session)
    request = types.SaveWeightsForSamplerRequest(
        model_id=run_id, seq_id=1, sampling_session_seq_id=7
    )
    saved = harness.op(run_id, 1, JobKind.SAVE_WEIGHTS_FOR_SAMPLER, encode_json(request))
    sampler_id = msgspec.json.decode(harness.result(saved))["sampling_session_id"]
    assert sampler_id == f"{session}:sample:7"
    response = decode_sample_response(harness.result(harness.sample(sampler_id, 0)))
    assert len(response.sequences[0].tokens) > 0


def test_same_seed_gives_same_sample(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    sampler_id = harness.sampler(tenant, harness.session(tenant))
    samples = [
        decode_sample_response(harness.result(harness.sample(sampler_id, number, seed=11)))
        for number in range(3)
    ]
    assert samples[0].sequences[0].tokens == samples[1].sequences[0].tokens
    assert samples[1].sequences[0].tokens == samples[2].sequences[0].tokens


def test_cancelled_sample_finishes_immediately(harness: WorkerHarness) -> None:
    harness.start(FakeEngine([BASE_MODEL], seconds_per_op=0.05))
    tenant = harness.tenant()
    sampler_id = harness.sampler(tenant, harness.session(tenant))
    samples = [harness.sample(sampler_id, number) for number in range(12)]
    assert harness.queue.cancel(tenant, samples[-1].id).result() is True
    assert "cancelled" in (harness.outcome(samples[-1]).job.error or "")
    for job in samples[:-1]:
        harness.result(job)
    assert harness.queue.cancel(tenant, samples[0].id).result() is False


def test_usage_is_recorded(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    train(harness, run_id, 1, 2)
    query = sa.select(sa.func.sum(usage.c.amount)).where(usage.c.kind == "training")
    assert count(harness.database, query) == 2 * (len(TOKENS) - 1)


def test_job_is_failed_after_max_attempts(harness: WorkerHarness) -> None:
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    job = harness.optim_step(run_id, 1)
    harness.database.write(
        lambda db: db.execute(
            sa.update(jobs).where(jobs.c.id == job.id).values(state="running", attempts=3)
        )
    )
    harness.start()
    failed = harness.outcome(job).job
    assert failed.category == "server"
    assert "is not retried" in (failed.error or "")


def test_model_is_unloaded_when_session_expires(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.jobs.worker.MAINTENANCE_SECONDS", 0.05)
    harness.start()
    tenant = harness.tenant()
    session = harness.session(tenant)
    run_id = harness.model(tenant, session)
    losses = train(harness, run_id, 1, 2)
    harness.database.write(lambda db: db.execute(sa.text("UPDATE sessions SET expired_at = 1.0")))
    until = time.monotonic() + 60
    while harness.engine.has_adapter(run_id) and time.monotonic() < until:
        time.sleep(0.01)
    assert not harness.engine.has_adapter(run_id)
    assert train(harness, run_id, 5, 1)[0] < losses[-1]


def test_other_tenants_sample_fails_after_published_weights_are_replaced(
    harness: WorkerHarness,
) -> None:
    owner, other = harness.tenant("alice"), harness.tenant("bob")
    harness.start()
    run_id = harness.model(owner, harness.session(owner))
    harness.result(harness.save(run_id, 1, "published"))
    harness.stop()
    path = f"tinker://{run_id}/weights/published"
    mine, theirs = (_sample_from(harness, tenant, path) for tenant in (owner, other))
    # Submitted before the weights at this path were replaced.
    harness.database.write(
        lambda db: db.execute(sa.text("UPDATE checkpoints SET created_at = created_at + 60"))
    )
    harness.start()
    harness.result(mine)
    assert "were deleted" in (harness.outcome(theirs).job.error or "")


def _sample_from(harness: WorkerHarness, tenant: str, path: str) -> JobRecord:
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
    return harness.queue.submit(new).result()
