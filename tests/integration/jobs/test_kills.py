"""SIGKILL of the worker around commits: every job runs exactly once, in order."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from tests.integration.jobs import crashing_worker
from tests.integration.jobs.conftest import WorkerHarness, count
from tests.support.forkserver import forks_of
from tinkex.checkpoint.manifest import read_manifest
from tinkex.store.records import JobRecord
from tinkex.store.schema import checkpoints, jobs, runs, steps
from tinkex.system.atomic import SCRATCH_PREFIX
from tinkex.wire.proto import decode_forward_backward_output, decode_sample_response

NUM_STEPS = 10
NUM_KILLS = 20


class JobScenario:
    """A training loop of two models and a sampler, submitted in advance."""

    def __init__(self, harness: WorkerHarness) -> None:
        self.harness = harness
        self.passes: list[JobRecord] = []
        self.optim_jobs: list[JobRecord] = []
        self.saves: list[JobRecord] = []
        self.samples: list[JobRecord] = []

    def submit_all(self) -> None:
        harness = self.harness
        tenant = harness.tenant()
        session = harness.session(tenant)
        sampler_id = harness.sampler(tenant, session)
        models = [harness.model(tenant, session, number) for number in range(2)]
        for step in range(NUM_STEPS):
            for number, run_id in enumerate(models):
                first = 1 + 3 * step
                tokens = [(step + offset + number) % 50 + 3 for offset in range(6)]
                self.passes.append(harness.forward_backward(run_id, first, tokens))
                self.optim_jobs.append(harness.optim_step(run_id, first + 1))
                self.saves.append(harness.save(run_id, first + 2, f"step-{step}"))
            self.samples.append(harness.sample(sampler_id, step, seed=step))

    @property
    def is_over(self) -> bool:
        waiting = sa.select(sa.func.count()).where(jobs.c.finished_at.is_(None))
        return count(self.harness.database, waiting) == 0

    def results(self) -> list[object]:
        """Return all results that a client can see."""
        harness = self.harness
        losses = [decode_forward_backward_output(harness.result(job)) for job in self.passes]
        norms = [msgspec.json.decode(harness.result(job))["metrics"] for job in self.optim_jobs]
        digests = [_digest(harness, job) for job in self.saves]
        tokens = [decode_sample_response(harness.result(job)) for job in self.samples]
        return [
            [(loss.metrics, loss.loss_fn_outputs) for loss in losses],
            norms,
            digests,
            [response.sequences[0].tokens for response in tokens],
        ]


def _digest(harness: WorkerHarness, job: JobRecord) -> str:
    harness.result(job)
    files = read_manifest(harness.home.checkpoint_directory(job.id)).files
    return files["adapter_model.safetensors"].sha256


def run_worker(root: Path, num_commits: int, where: str) -> int:
    """Run a worker process until it crashes or all jobs are finished."""
    # Forked, because imports take longer than a worker runs.
    forks = forks_of(crashing_worker.__name__)
    process = forks.Process(target=crashing_worker.work, args=(root, num_commits, where))
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the worker did not end"
    return int(process.exitcode)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    harness = WorkerHarness(tmp_path_factory.mktemp("calm"))
    try:
        scenario = JobScenario(harness)
        scenario.submit_all()
        harness.start()
        return scenario.results()
    finally:
        harness.close()


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 11))]
)
def test_worker_killed_around_commits_runs_each_job_once(
    tmp_path: Path, uninterrupted: list[object], seed: int
) -> None:
    rng = random.Random(seed)
    # Like the crashing workers: the crashes are not caused by the jobs.
    harness = WorkerHarness(tmp_path, max_attempts=1_000_000)
    try:
        scenario = JobScenario(harness)
        scenario.submit_all()
        num_kills = 0
        while num_kills < NUM_KILLS and not scenario.is_over:
            where = rng.choice(["before", "after"])
            # A worker needs three commits to start; each iteration makes some progress.
            assert run_worker(tmp_path, rng.randint(4, 16), where) == -signal.SIGKILL
            num_kills += 1
        assert num_kills >= 5
        harness.start()
        assert scenario.results() == uninterrupted
        harness.stop()
        assert_nothing_is_left_over(harness)
    finally:
        harness.close()


def assert_nothing_is_left_over(harness: WorkerHarness) -> None:
    """Check that rows match directories, and that every operation was counted once."""
    num_jobs = count(harness.database, sa.select(sa.func.count()).select_from(jobs))
    assert count(harness.database, sa.select(sa.func.count()).select_from(steps)) == num_jobs
    rows = harness.read(lambda db: set(db.scalars(sa.select(checkpoints.c.id))))
    # Partial directories of killed workers are kept for an hour.
    names = {path.name for path in harness.home.checkpoints.iterdir()}
    assert {name for name in names if not name.startswith(SCRATCH_PREFIX)} == rows
    run_rows = harness.read(lambda db: db.execute(sa.select(runs)).all())
    assert {run.snapshot for run in run_rows} == {
        path.name for path in harness.home.snapshots.iterdir()
    }
    for run in run_rows:
        assert run.applied == 1 + 2 * NUM_STEPS
        assert run.next_seq == 1 + 3 * NUM_STEPS
