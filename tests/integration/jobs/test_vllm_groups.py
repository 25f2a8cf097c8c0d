"""A worker that samples with vLLM beside one that trains: placement, refusals, death, drift."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.jobs.conftest import BASE_MODEL, WorkerHarness
from tests.support.fake_vllm import ENDLESS_TOKENS, write_python
from tests.support.model_folder_files import write_folder
from tests.support.serve_process import eventually
from tinkex import types
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.models.model_folder import read_model_folder
from tinkex.engine.protocol import Engine, EngineLost, FinishedSample, SamplerSource
from tinkex.engine.vllm.bridge import VllmConfig, VllmEngine
from tinkex.jobs import drift
from tinkex.jobs.active_samples import SampleOrigin
from tinkex.jobs.job_types import INTERNAL_TENANT, JobKind
from tinkex.jobs.queue import JobQueue, QueueLimits
from tinkex.jobs.worker import Worker
from tinkex.jobs.worker_config import WorkerConfig
from tinkex.server.http.model_specs import list_served_models
from tinkex.store import groups, jobs, schema, stats
from tinkex.store.database import Database
from tinkex.store.records import GroupRecord, GroupState, JobRecord, NewJob
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import decode_sample_response


class EngineWorker:
    """A worker of one group with any engine, in a thread."""

    def __init__(self, harness: WorkerHarness, group_id: str, engine: Engine) -> None:
        self.engine = engine
        self.database = Database(harness.url)
        check_alive = engine.check_alive if isinstance(engine, VllmEngine) else lambda: False
        self.worker = Worker(
            database=self.database,
            engine=engine,
            home=harness.home,
            config=WorkerConfig(owner=f"test-{group_id}", group_id=group_id),
            refresh_models=check_alive,
        )
        self.error: EngineLost | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except EngineLost as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.worker.stop()
        self.join()
        self.engine.close()
        self.database.close()


Start = Callable[..., EngineWorker]


@pytest.fixture
def start(harness: WorkerHarness, tmp_path: Path) -> Iterator[Start]:
    """Start the trainer, or a worker with vLLM."""
    started: list[EngineWorker] = []
    harness.queue.close()
    harness.queue = JobQueue(
        harness.database, QueueLimits(), b"secret", vllm_models=frozenset({BASE_MODEL})
    )
    folder = read_model_folder(write_folder(tmp_path / "model"))

    def start_group(group_id: str, **variables: str) -> EngineWorker:
        engine: Engine = FakeEngine([BASE_MODEL])
        if group_id:
            python = write_python(tmp_path / group_id, **variables)
            engine = VllmEngine(
                VllmConfig(python=str(python), base_model=BASE_MODEL, folder=folder)
            )
        worker = EngineWorker(harness, group_id, engine)
        started.append(worker)
        eventually(lambda: is_ready(harness, group_id))
        # The queue caches the list of groups.
        harness.queue._placement_valid_until = 0.0
        return worker

    yield start_group
    for worker in started:
        worker.stop()


def current(harness: WorkerHarness) -> dict[str, GroupRecord]:
    return {group.id: group for group in harness.read(groups.list_current)}


def is_ready(harness: WorkerHarness, group_id: str) -> bool:
    group = current(harness).get(group_id)
    return group is not None and group.state == GroupState.READY


def submit(harness: WorkerHarness, tenant: str, **params: Any) -> JobRecord:
    request = types.SampleRequest(
        prompt=types.ModelInput.from_ints([1, 2, 3]),
        sampling_params=types.SamplingParams(**{"max_tokens": 8, "seed": 1, **params}),
        base_model=BASE_MODEL,
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
        num_tokens=11,
        base_model=BASE_MODEL,
    )
    return harness.queue.submit(new).result()


def sample_adapter(harness: WorkerHarness) -> JobRecord:
    """Sample from an adapter that has been trained."""
    tenant = harness.tenant()
    session = harness.session(tenant)
    run_id = harness.model(tenant, session)
    harness.forward_backward(run_id, 1, [1, 2, 3, 4])
    harness.optim_step(run_id, 2)
    saved = harness.save(run_id, 3, "a")
    harness.result(saved)
    return harness.sample(harness.sampler(tenant, session, saved.id), 0)


def group_of(harness: WorkerHarness, job: JobRecord) -> str:
    found = harness.read(lambda db: jobs.find(db, job.id))
    assert found is not None
    return str(found.group_id)


def tokens_of(harness: WorkerHarness, job: JobRecord) -> list[int]:
    return list(decode_sample_response(harness.result(job)).sequences[0].tokens)


def test_samples_go_to_vllm_and_models_do_not(harness: WorkerHarness, start: Start) -> None:
    start("")
    start("vllm")
    (described,) = harness.read(list_served_models)
    assert described.is_trainable and described.arch == "bigram"
    tenant = harness.tenant()
    session = harness.session(tenant)
    for number in range(4):
        run_id = harness.model(tenant, session, number)
        place = harness.database.write(
            lambda db, run_id=run_id: harness.queue.place_run(db, run_id, BASE_MODEL)
        )
        assert place == ""
    job = harness.forward_backward(run_id, 1, [1, 2, 3, 4])
    harness.result(job)
    saved = harness.save(run_id, 2, "a")
    harness.result(saved)
    with_adapter = harness.sample(harness.sampler(tenant, session, saved.id), 0)
    plain = submit(harness, tenant)
    assert tokens_of(harness, plain) and tokens_of(harness, with_adapter)
    assert group_of(harness, plain) == group_of(harness, with_adapter) == "vllm"
    assert group_of(harness, job) == ""


def test_what_vllm_declines_runs_on_the_trainer(harness: WorkerHarness, start: Start) -> None:
    start("")
    start("vllm")
    tenant = harness.tenant()
    declined = submit(harness, tenant, top_p=0.5)
    assert declined.group_id == "vllm"
    tokens_of(harness, declined)
    found = harness.read(lambda db: jobs.find(db, declined.id))
    assert found.group_id == "" and found.attempts == 1


def test_declined_sample_fails_without_a_trainer(harness: WorkerHarness, start: Start) -> None:
    start("vllm")
    outcome = harness.outcome(submit(harness, harness.tenant(), top_p=0.5))
    assert outcome.job.category == "server"
    assert "no worker that trains serves its base model" in (outcome.job.error or "")


def test_samples_run_on_the_trainer_without_vllm(
    harness: WorkerHarness, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start("")
    tenant = harness.tenant()
    with caplog.at_level("INFO"):
        for _ in range(2):
            job = submit(harness, tenant)
            tokens_of(harness, job)
        assert group_of(harness, job) == ""
        start("vllm")
        tokens_of(harness, submit(harness, tenant))
    words = [record.message for record in caplog.records if record.name == "tinkex.jobs.queue"]
    assert words == [
        f"no worker with vLLM serves {BASE_MODEL}; its samples go to the others",
        f"samples of {BASE_MODEL} go to vLLM",
    ]


def test_samples_of_dead_vllm_run_elsewhere_once(harness: WorkerHarness, start: Start) -> None:
    start("")
    vllm = start("vllm")
    assert isinstance(vllm.engine, VllmEngine)
    tenant = harness.tenant()
    tokens_of(harness, submit(harness, tenant))
    vllm.engine._limits = replace(vllm.engine._limits, max_context_tokens=4096)
    held = [submit(harness, tenant, max_tokens=ENDLESS_TOKENS, stop=[]) for _ in range(3)]
    eventually(lambda: vllm.engine.num_samples == 3)
    os.kill(vllm.engine.pid, signal.SIGKILL)
    assert [len(tokens_of(harness, job)) for job in held] == [ENDLESS_TOKENS] * 3
    vllm.join()
    assert vllm.error is not None
    assert current(harness)["vllm"].state == GroupState.DRAINING
    harness.queue._placement_valid_until = 0.0
    after = submit(harness, tenant)
    tokens_of(harness, after)
    found = [harness.read(lambda db, job=job: jobs.find(db, job.id)) for job in [*held, after]]
    assert [(job.group_id, job.attempts) for job in found] == [("", 2)] * 3 + [("", 1)]
    # The restarted worker takes part again.
    start("vllm")
    assert submit(harness, tenant).group_id == "vllm"


@pytest.mark.parametrize(("offset", "has_adapter"), [(0.0, True), (0.05, False)])
def test_drift_is_measured_on_the_trainer(
    harness: WorkerHarness,
    start: Start,
    caplog: pytest.LogCaptureFixture,
    offset: float,
    has_adapter: bool,
) -> None:
    start("")
    start("vllm", FAKE_VLLM_OFFSET=str(offset))
    tenant = harness.tenant()
    tokens_of(harness, sample_adapter(harness) if has_adapter else submit(harness, tenant))
    eventually(lambda: "drift_mean" in current(harness)["vllm"].load)
    found = harness.read(lambda db: stats.collect_stats(db, alive_since=0.0))
    assert found.drift_mean == {BASE_MODEL: pytest.approx(offset, abs=1e-6)}
    assert found.drift_max == {BASE_MODEL: pytest.approx(offset, abs=1e-6)}
    assert ("differ from the trainer's by 0.0500" in caplog.text) == (offset > drift.WARNING_DRIFT)
    # Scoring is not charged to anybody.
    charged = harness.read(lambda db: db.execute(schema.usage.select()).fetchall())
    assert {row.tenant_id for row in charged} == {tenant}
    scored = harness.read(
        lambda db: db.execute(
            schema.jobs.select().where(schema.jobs.c.tenant_id == INTERNAL_TENANT)
        ).fetchall()
    )
    assert [row.group_id for row in scored] == [""]
    eventually(lambda: not harness.read(lambda db: db.execute(unfetched()).fetchall()))


def unfetched() -> sa.Select[Any]:
    """The scores that are not marked for deletion."""
    table = schema.jobs
    return sa.select(table.c.id).where(
        table.c.tenant_id == INTERNAL_TENANT, table.c.fetched_at.is_(None)
    )


def test_one_sample_a_minute_and_one_of_a_hundred_are_scored(
    harness: WorkerHarness,
) -> None:
    member = type("Member", (), {"can_train": False, "measurements": {}})()
    member.place_on_trainer = lambda *_: ""
    clock, drawn = [0.0], [0.5]
    monitor = drift.DriftMonitor(
        harness.database, member, draw=lambda: drawn[0], monotonic=lambda: clock[0]
    )
    engine = FakeEngine([BASE_MODEL])
    request = types.SampleRequest(
        prompt=types.ModelInput.from_ints([1, 2]),
        sampling_params=types.SamplingParams(max_tokens=4),
    )
    source = SamplerSource(base_model=BASE_MODEL)
    engine.start_sample("a", source, request)
    finished: list[FinishedSample] = []
    eventually(lambda: bool(finished.extend(engine.step_samples()) or finished))
    response = finished[0].outcome
    assert isinstance(response, types.SampleResponse)
    origin = SampleOrigin(source)
    for at, number, expected in [(0, 0.5, 1), (30, 0.5, 1), (60, 0.5, 2), (61, 0.009, 3)]:
        clock[0], drawn[0] = at, number
        monitor.observe(origin, request, response)
        assert len(monitor._pending) == expected
    warm = types.SampleRequest(
        prompt=request.prompt, sampling_params=types.SamplingParams(max_tokens=4, temperature=0.5)
    )
    monitor.observe(origin, warm, response)
    assert len(monitor._pending) == 3
    # Scores that never come are given up.
    clock[0] += drift.MAX_WAIT_SECONDS + 1
    monitor.collect()
    assert not monitor._pending
    monitor.close()
