"""Old unnamed sampler weights are deleted, but not while a sample needs them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from tests.integration.jobs.conftest import BASE_MODEL, WorkerHarness
from tinkex import types
from tinkex.engine.fake.engine import FakeEngine
from tinkex.jobs.housekeeping import HousekeepingPolicy
from tinkex.jobs.job_types import JobKind
from tinkex.store.schema import checkpoints
from tinkex.wire.codec import encode_json


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WorkerHarness]:
    worker_harness = WorkerHarness(tmp_path, housekeeping=HousekeepingPolicy(interval_seconds=0.02))
    yield worker_harness
    worker_harness.close()


def save_unnamed(harness: WorkerHarness, run_id: str, seq: int) -> str:
    """Save unnamed sampler weights and return their sampling session."""
    request = types.SaveWeightsForSamplerRequest(
        model_id=run_id, sampling_session_seq_id=seq, seq_id=seq
    )
    job = harness.op(run_id, seq, JobKind.SAVE_WEIGHTS_FOR_SAMPLER, encode_json(request))
    sampler_id: str = msgspec.json.decode(harness.result(job))["sampling_session_id"]
    return sampler_id


def kept(harness: WorkerHarness) -> int:
    """Return the number of unnamed weights once rows and files agree."""
    query = sa.select(sa.func.count()).select_from(checkpoints)
    for _ in range(500):
        rows = harness.read(lambda db: db.scalar(query))
        files = len(list(harness.home.checkpoints.iterdir()))
        deleted = harness.read(
            lambda db: db.scalar(query.where(checkpoints.c.deleted_at.is_not(None)))
        )
        if rows == files and not deleted:
            return files
        time.sleep(0.02)
    raise AssertionError(f"{rows} rows, {files} directories, {deleted} deleted")


def test_newest_unnamed_weights_are_kept(harness: WorkerHarness) -> None:
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    saved = [save_unnamed(harness, run_id, seq) for seq in range(1, 9)]
    assert kept(harness) == 3
    for sampler_id in saved[-3:]:
        harness.result(harness.sample(sampler_id, 1))
    error = harness.outcome(harness.sample(saved[0], 1)).job.error
    assert error is not None
    assert "were deleted: a model keeps the 3 unnamed sampler weights" in error
    assert "save them under a name" in error


def test_sampling_from_evicted_weights_fails_with_clear_error(
    harness: WorkerHarness,
) -> None:
    harness.start()
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    first = save_unnamed(harness, run_id, 1)
    harness.result(harness.sample(first, 1))
    for seq in range(2, 6):
        save_unnamed(harness, run_id, seq)
    assert kept(harness) == 3
    error = harness.outcome(harness.sample(first, 2)).job.error
    assert error is not None
    assert "were deleted" in error


def test_unnamed_weights_kept_while_samples_are_pending(harness: WorkerHarness) -> None:
    harness.start(FakeEngine([BASE_MODEL], seconds_per_op=0.05))
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    first = save_unnamed(harness, run_id, 1)
    waiting = [harness.sample(first, seq) for seq in range(1, 9)]
    for seq in range(2, 8):
        save_unnamed(harness, run_id, seq)
    for job in waiting:
        harness.result(job)
    save_unnamed(harness, run_id, 8)
    assert kept(harness) == 3
