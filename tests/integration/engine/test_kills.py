"""kill -9 of a worker at any time: every job takes effect exactly once, bit-identically."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
import torch
from safetensors.torch import load_file

from tests.integration.engine.crashing_worker import COMMITS, VERBS, CrashPoint, WorkerSpec
from tests.integration.jobs.conftest import BASE_MODEL, WorkerHarness, count
from tinkex.checkpoint.manifest import check_manifest
from tinkex.engine.config import EngineConfig
from tinkex.engine.protocol import AdapterSpec, GeneratorPassRun, OptimParams, Pass
from tinkex.engine.torch_engine import TorchEngine
from tinkex.store.records import JobRecord
from tinkex.store.schema import checkpoints, jobs, runs, steps
from tinkex.system.atomic import SCRATCH_PREFIX
from tinkex.wire.proto import decode_forward_backward_output, decode_sample_response

NUM_STEPS = 12
MODELS = ("alice", "bob")
OPTIMIZERS = ("adamw", "dimuon")
#: Of the passes of each; so few tokens as three come out a little different beside others.
LENGTHS = ((9, 4), (29, 34))
#: Where workers die first.
EARLY = ("create", "start_sample", "step_samples")
#: Weights of a model that shared its passes with others, against one that did not.
TOLERANCE = 1e-5
SPEC = AdapterSpec(base_model=BASE_MODEL, rank=8, seed=1)
#: Nothing here takes this long; it only says that nothing hangs.
TIMEOUT_SECONDS = 180.0


class JobScenario:
    """Two tenants train, save, load and sample; all jobs are submitted at the beginning."""

    def __init__(self, harness: WorkerHarness) -> None:
        self.harness = harness
        self.passes: list[JobRecord] = []
        self.optim_jobs: list[JobRecord] = []
        self.saves: list[JobRecord] = []
        self.loads: list[JobRecord] = []
        self.samples: list[JobRecord] = []
        self.num_changes = 0

    def submit_all(self) -> None:
        for number, name in enumerate(MODELS):
            tenant = self.harness.tenant(name)
            session = self.harness.session(tenant)
            sampler_id = self.harness.sampler(tenant, session)
            run_id = self.harness.model(tenant, session, optimizer=OPTIMIZERS[number])
            self._train(run_id, number)
            for seq in range(4):
                sample = self.harness.sample(sampler_id, seq, seed=10 * number + seq, max_tokens=99)
                self.samples.append(sample)

    def _train(self, run_id: str, number: int) -> None:
        harness, seq = self.harness, 0
        for step in range(NUM_STEPS):
            for half in range(2):
                tokens = text(step + half, LENGTHS[number][half])
                self.passes.append(harness.forward_backward(run_id, seq := seq + 1, tokens))
            self.optim_jobs.append(harness.optim_step(run_id, seq := seq + 1, 0.01))
            self.saves.append(harness.save(run_id, seq := seq + 1, f"step-{step}"))
            if step % 3 == 2:
                # Load the previous step, which is then repeated.
                self.loads.append(harness.load(run_id, seq := seq + 1, self.saves[-2].id))
        self.num_changes = 1 + 3 * NUM_STEPS + NUM_STEPS // 3

    @property
    def is_over(self) -> bool:
        waiting = sa.select(sa.func.count()).where(jobs.c.finished_at.is_(None))
        return count(self.harness.database, waiting) == 0

    def results(self) -> dict[str, Any]:
        """Everything that a client can see."""
        result = self.harness.result
        for job in self.loads:
            result(job)
        passes = [decode_forward_backward_output(result(job)) for job in self.passes]
        samples = [decode_sample_response(result(job)).sequences[0] for job in self.samples]
        return {
            "losses": [output.metrics for output in passes],
            "logprobs": [
                [one["logprobs"].to_numpy().tobytes() for one in output.loss_fn_outputs]
                for output in passes
            ],
            "steps": [msgspec.json.decode(result(job))["metrics"] for job in self.optim_jobs],
            "weights": [self._digests(job) for job in self.saves],
            "tokens": [one.tokens for one in samples],
        }

    def _digests(self, job: JobRecord) -> dict[str, str]:
        self.harness.result(job)
        files = check_manifest(self.harness.home.checkpoint_directory(job.id)).files
        return {name: entry.sha256 for name, entry in files.items()}

    def weights(self) -> list[dict[str, torch.Tensor]]:
        """The saved checkpoints, after all jobs."""
        self.results()
        folders = [self.harness.home.checkpoint_directory(job.id) for job in self.saves]
        return [load_file(folder / "adapter_model.safetensors") for folder in folders]


def text(seed: int, length: int) -> list[int]:
    return [(31 * seed + 7 * offset) % 200 + 3 for offset in range(length)]


class Workers:
    """Workers that crash, one after another."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.integration.engine.crashing_worker", str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def live(self, worker_spec: WorkerSpec) -> str:
        """Where a worker crashed; empty if it did not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(worker_spec) + "\n")
        self._process.stdin.flush()
        *verb, status = self._process.stdout.readline().split()
        assert int(status) in (0, -signal.SIGKILL)
        # A crash around a commit is not logged.
        return verb[0] if verb else worker_spec.crash_point.where if int(status) else ""

    def close(self) -> None:
        self._process.communicate(timeout=TIMEOUT_SECONDS)
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[Workers]:
    made = Workers(folder)
    yield made
    made.close()


def random_crash_point(rng: random.Random, where: str) -> CrashPoint:
    # A worker needs three commits to start; it calls most methods a few times before it crashes.
    calls_before_crash: dict[str, Sequence[int]] = dict.fromkeys(COMMITS, range(3, 21))
    calls_before_crash |= dict.fromkeys((*EARLY, "restore"), (0, 1)) | {"load": (0,)}
    num_calls_before_crash = rng.choice(calls_before_crash.get(where, (0, 0, 1, 2, 5)))
    return CrashPoint(where, num_calls_before_crash, int(10 ** rng.uniform(0.0, 3.5)))


def run_with_kills(
    scenario: JobScenario,
    workers: Workers,
    rng: random.Random,
    *,
    is_deterministic: bool,
    adapter_bytes: int = 0,
) -> None:
    """Crash workers at every possible point, in any order, until all jobs are done."""
    everywhere = [*VERBS, *COMMITS]
    left = list(everywhere)
    while left and not scenario.is_over:
        # Models are created first, and samples finish early.
        early = [point for point in EARLY if point in left]
        crash_point = random_crash_point(rng, early[0] if early else rng.choice(left))
        root = str(scenario.harness.home.root)
        died = workers.live(WorkerSpec(root, is_deterministic, crash_point, adapter_bytes))
        # Another crash may have come first: there is nothing to restore in the beginning.
        if died in left:
            left.remove(died)
    # How far each worker gets is random, so all jobs may be done earlier.
    assert len(left) <= len(everywhere) // 4, left


def start(harness: WorkerHarness, folder: Path, is_deterministic: bool) -> None:
    config = EngineConfig(threads=1, is_deterministic=is_deterministic)
    harness.start(TorchEngine({BASE_MODEL: str(folder)}, config))  # type: ignore[arg-type]


@contextmanager
def scenario_in(root: Path) -> Iterator[JobScenario]:
    harness = WorkerHarness(root, max_attempts=1_000_000)
    try:
        scenario = JobScenario(harness)
        scenario.submit_all()
        yield scenario
    finally:
        harness.close()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Any]:
    with scenario_in(tmp_path_factory.mktemp("calm")) as scenario:
        start(scenario.harness, folder, is_deterministic=True)
        return scenario.results()


@pytest.fixture(scope="module")
def uninterrupted_weights(
    tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> list[dict[str, torch.Tensor]]:
    with scenario_in(tmp_path_factory.mktemp("calm")) as scenario:
        start(scenario.harness, folder, is_deterministic=False)
        found = scenario.weights()
        assert max_passes_per_run(scenario.harness) == len(MODELS)
        return found


def max_passes_per_run(harness: WorkerHarness) -> int:
    """The number of passes of each engine run; passes of one run have the same start time."""
    moments = sa.select(steps.c.started_at).where(steps.c.kind == "forward_backward")
    return max(Counter(harness.read(lambda db: list(db.scalars(moments)))).values())


class Evicting(TorchEngine):
    """Has memory for one model, and counts evictions between a pass and its step."""

    def __init__(self, folder: Path) -> None:
        super().__init__({BASE_MODEL: str(folder)}, EngineConfig(threads=1, is_deterministic=True))
        self._config = replace(self._config, adapter_bytes=self.training_bytes(SPEC))
        self._accumulating: set[str] = set()
        self.num_dropped_with_gradients = 0

    def start_passes(self, passes: Sequence[Pass]) -> GeneratorPassRun:
        self._accumulating |= {one.adapter_id for one in passes}
        return super().start_passes(passes)

    def optim_step(self, adapter_id: str, params: OptimParams) -> Mapping[str, float]:
        self._accumulating.discard(adapter_id)
        return super().optim_step(adapter_id, params)

    def drop(self, adapter_id: str) -> None:
        self.num_dropped_with_gradients += adapter_id in self._accumulating
        self._accumulating.discard(adapter_id)
        super().drop(adapter_id)


def test_eviction_between_pass_and_step_is_bit_identical(
    tmp_path: Path, folder: Path, uninterrupted: dict[str, Any]
) -> None:
    with scenario_in(tmp_path) as scenario:
        engine = Evicting(folder)
        scenario.harness.start(engine)  # type: ignore[arg-type]
        results = scenario.results()
        for name in uninterrupted:
            assert results[name] == uninterrupted[name], name
        assert engine.num_dropped_with_gradients > 0
        scenario.harness.stop()
        assert_every_job_ran_once(scenario)


@pytest.mark.parametrize(
    ("seed", "is_evicting"),
    [
        (1, False),
        (2, True),
        pytest.param(4, False, marks=pytest.mark.slow),
        pytest.param(5, True, marks=pytest.mark.slow),
    ],
)
def test_killed_worker_recovers_bit_identically(
    tmp_path: Path,
    folder: Path,
    workers: Workers,
    uninterrupted: dict[str, Any],
    seed: int,
    is_evicting: bool,
) -> None:
    budget = Evicting(folder).max_adapter_bytes if is_evicting else 0
    with scenario_in(tmp_path) as scenario:
        run_with_kills(
            scenario, workers, random.Random(seed), is_deterministic=True, adapter_bytes=budget
        )
        start(scenario.harness, folder, is_deterministic=True)
        results = scenario.results()
        for name in uninterrupted:
            assert results[name] == uninterrupted[name], name
        scenario.harness.stop()
        assert_every_job_ran_once(scenario)


def test_batched_tenants_match_within_tolerance(
    tmp_path: Path,
    folder: Path,
    workers: Workers,
    uninterrupted_weights: list[dict[str, torch.Tensor]],
) -> None:
    with scenario_in(tmp_path) as scenario:
        run_with_kills(scenario, workers, random.Random(3), is_deterministic=False)
        start(scenario.harness, folder, is_deterministic=False)
        for mine, expected_weights in zip(scenario.weights(), uninterrupted_weights, strict=True):
            torch.testing.assert_close(mine, expected_weights, atol=TOLERANCE, rtol=0.0)
        scenario.harness.stop()
        assert_every_job_ran_once(scenario)


def assert_every_job_ran_once(scenario: JobScenario) -> None:
    """Rows and directories match, and every operation was counted once."""
    harness = scenario.harness
    num_jobs = count(harness.database, sa.select(sa.func.count()).select_from(jobs))
    assert count(harness.database, sa.select(sa.func.count()).select_from(steps)) == num_jobs
    rows = harness.read(lambda db: set(db.scalars(sa.select(checkpoints.c.id))))
    # Partial directories of crashed workers stay for an hour; nothing refers to them.
    names = {path.name for path in harness.home.checkpoints.iterdir()}
    assert {name for name in names if not name.startswith(SCRATCH_PREFIX)} == rows
    found = harness.read(lambda db: db.execute(sa.select(runs)).all())
    assert {run.snapshot for run in found} == {
        path.name for path in harness.home.snapshots.iterdir()
    }
    assert [run.applied for run in found] == [scenario.num_changes] * len(MODELS)
