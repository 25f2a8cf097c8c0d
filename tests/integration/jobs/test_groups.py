"""Several workers on one store: ownership, moves after a death, draining and stolen samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.integration.jobs.conftest import BASE_MODEL, WorkerHarness
from tests.integration.jobs.test_preemption import LONG, SHORT, GatedEngine
from tests.support.serve_process import eventually
from tinkex.engine.fake.engine import FakeEngine
from tinkex.errors import RateLimitError
from tinkex.jobs import lease
from tinkex.jobs.coordinator import GroupCoordinator
from tinkex.jobs.housekeeping import HousekeepingPolicy
from tinkex.jobs.job_types import JobKind
from tinkex.jobs.queue import JobQueue, QueueLimits
from tinkex.jobs.quotas import QuotaChecks
from tinkex.jobs.result_log import LeaseLost
from tinkex.jobs.worker import Worker
from tinkex.jobs.worker_config import WorkerConfig
from tinkex.store import coordination, groups, schema
from tinkex.store.database import Connection, Database
from tinkex.store.quotas import Quotas
from tinkex.store.records import GroupRecord, GroupState, JobRecord, JobState

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]
#: How soon the tests take a silent group for dead.
MOVE_AFTER_SECONDS = 3.0


class GroupWorker:
    """A worker of one group, in a thread."""

    def __init__(
        self,
        harness: WorkerHarness,
        group_id: str,
        seconds_per_op: float = 0.0,
        quotas: QuotaChecks | None = None,
        engine: FakeEngine | None = None,
    ) -> None:
        self.id = group_id
        self.engine = engine or FakeEngine([BASE_MODEL], seconds_per_op=seconds_per_op)
        self.database = Database(harness.url)
        config = WorkerConfig(
            owner=f"test-{group_id}",
            group_id=group_id,
            move_after_seconds=MOVE_AFTER_SECONDS,
            housekeeping=HousekeepingPolicy(interval_seconds=0.2),
            quotas=quotas or QuotaChecks(),
        )
        self.worker = Worker(
            database=self.database, engine=self.engine, home=harness.home, config=config
        )
        self.error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except LeaseLost as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.worker.stop()
        self.join()
        if not self._is_closed:
            self.database.close()
        self._is_closed = True


@pytest.fixture
def start(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., GroupWorker]]:
    """Start workers of groups; those that still run at the end are stopped."""
    monkeypatch.setattr(lease, "RENEW_SECONDS", MOVE_AFTER_SECONDS / 10)
    started: list[GroupWorker] = []

    def start_group(group_id: str, **options: Any) -> GroupWorker:
        worker = GroupWorker(harness, group_id, **options)
        started.append(worker)
        eventually(lambda: group_id in {one.id for one in harness.read(groups.list_current)})
        return worker

    yield start_group
    for worker in started:
        worker.stop()


def place(harness: WorkerHarness, run_id: str, group_id: str) -> None:
    """Put a model into a group before its first worker starts."""
    harness.database.write(lambda db: groups.move_runs(db, [run_id], group_id))


def train(harness: WorkerHarness, run_id: str, first_seq: int, num_steps: int) -> list[JobRecord]:
    submitted = []
    for number in range(num_steps):
        seq = first_seq + 2 * number
        submitted.append(harness.forward_backward(run_id, seq, TOKENS))
        submitted.append(harness.optim_step(run_id, seq + 1))
    return submitted


def owner_of(harness: WorkerHarness, run_id: str) -> str:
    return harness.run(run_id).group_id


def weights(harness: WorkerHarness, run_id: str, seq: int, name: str) -> dict[str, bytes]:
    """Save a model and return its files."""
    job = harness.save(run_id, seq, name)
    harness.result(job)
    folder = harness.home.checkpoint_directory(job.id)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_each_group_runs_its_own_models(
    harness: WorkerHarness, start: Callable[..., GroupWorker]
) -> None:
    tenant = harness.tenant()
    session = harness.session(tenant)
    runs = [harness.model(tenant, session, number) for number in range(2)]
    place(harness, runs[1], "two")
    one, two = start(""), start("two")
    for run_id in runs:
        for job in train(harness, run_id, 1, 2):
            harness.result(job)
    assert one.engine.has_adapter(runs[0]) and not one.engine.has_adapter(runs[1])
    assert two.engine.has_adapter(runs[1]) and not two.engine.has_adapter(runs[0])


def test_models_of_a_dead_group_continue_bit_equal_elsewhere(
    harness: WorkerHarness, start: Callable[..., GroupWorker]
) -> None:
    tenant = harness.tenant()
    session = harness.session(tenant)
    moved, reference = (harness.model(tenant, session, number) for number in range(2))
    place(harness, moved, "dies")
    survivor, dies = start(""), start("dies")
    for run_id in (moved, reference):
        for job in train(harness, run_id, 1, 3):
            harness.result(job)
    kill(dies)
    late = [job for run_id in (moved, reference) for job in train(harness, run_id, 7, 2)]
    for job in late:
        harness.result(job)
    assert owner_of(harness, moved) == ""
    assert survivor.engine.has_adapter(moved)
    assert weights(harness, moved, 11, "a") == weights(harness, reference, 11, "a")
    assert "dies" not in {group.id for group in harness.read(groups.list_current)}


def kill(worker: GroupWorker) -> None:
    """Stop a worker's thread without letting it write: it looks dead to the others."""
    revoke_lease(worker)
    worker.worker.stop()
    worker.join()


def revoke_lease(worker: GroupWorker) -> None:
    name = coordination.group_lease(worker.id)

    def take_lease(db: Connection) -> None:
        state = coordination.find_lease(db, name)
        assert state is not None
        assert coordination.revoke_lease(db, name, state)

    worker.database.write(take_lease)


def test_worker_that_lost_its_lease_cannot_write(
    harness: WorkerHarness, start: Callable[..., GroupWorker]
) -> None:
    tenant = harness.tenant()
    run_id = harness.model(tenant, harness.session(tenant))
    slow = start("", seconds_per_op=0.5)
    harness.result(train(harness, run_id, 1, 1)[-1])
    job = harness.forward_backward(run_id, 3, TOKENS)
    eventually(lambda: harness.queue.find(job.tenant_id, job.id).state == JobState.RUNNING)
    revoke_lease(slow)
    slow.join()
    assert isinstance(slow.error, LeaseLost)
    assert not harness.queue.find(job.tenant_id, job.id).is_finished


def test_drained_group_hands_its_models_over(
    harness: WorkerHarness, start: Callable[..., GroupWorker]
) -> None:
    tenant = harness.tenant()
    session = harness.session(tenant)
    run_id = harness.model(tenant, session)
    place(harness, run_id, "leaves")
    start("")
    leaves = start("leaves", seconds_per_op=0.01)
    early = train(harness, run_id, 1, 2)
    harness.result(early[0])
    harness.database.write(lambda db: groups.set_state(db, "leaves", GroupState.DRAINING))
    leaves.join()
    for job in [*early, *train(harness, run_id, 5, 2)]:
        harness.result(job)
    assert owner_of(harness, run_id) == ""
    group = harness.read(lambda db: groups.find(db, "leaves"))
    assert group.state == GroupState.RETIRED
    # Nothing was lost or run twice: no attempt was counted for the interrupted operation.
    assert {harness.outcome(job).job.attempts for job in early} == {1}


def test_idle_group_takes_samples_of_a_busy_one(
    harness: WorkerHarness, start: Callable[..., GroupWorker]
) -> None:
    tenant = harness.tenant()
    session = harness.session(tenant)
    sampler_id = harness.sampler(tenant, session)
    start("busy", seconds_per_op=0.3)
    samples = [harness.sample(sampler_id, seq, num_tokens=500) for seq in range(40)]
    assert {job.group_id for job in samples} == {"busy"}
    start("idle")
    for job in samples:
        harness.result(job)
    executed = {harness.outcome(job).job.group_id for job in samples}
    assert executed == {"busy", "idle"}


def test_jobs_follow_a_model_that_moved_between_check_and_commit(
    harness: WorkerHarness, start: Callable[..., GroupWorker]
) -> None:
    tenant = harness.tenant()
    session = harness.session(tenant)
    run_id = harness.model(tenant, session)
    start("")
    start("two")
    job = harness.forward_backward(run_id, 1, TOKENS)
    harness.result(job)
    stray = harness.optim_step(run_id, 2)

    def misplace(db: Connection) -> None:
        db.execute(
            schema.jobs.update().where(schema.jobs.c.id == stray.id).values(group_id="somewhere")
        )

    harness.database.write(misplace)
    harness.result(stray)


def test_one_worker_cleans_up_a_store(
    harness: WorkerHarness, start: Callable[..., GroupWorker]
) -> None:
    first, second = start(""), start("two")
    eventually(lambda: find_coordinator(harness) is not None)
    holder = find_coordinator(harness)
    first.stop()
    # The released lease is taken by the other worker at once.
    eventually(lambda: find_coordinator(harness) not in {None, holder})
    assert second.error is None


def find_coordinator(harness: WorkerHarness) -> int | None:
    state = harness.read(lambda db: coordination.find_lease(db, lease.COORDINATOR_LEASE))
    return state.epoch if state is not None and state.until else None


def test_groups_are_not_taken_for_dead_after_an_outage_of_the_store(
    harness: WorkerHarness,
) -> None:
    for group_id in ("", "two"):
        register(harness, group_id)
    now = 0.0
    coordinator = GroupCoordinator(harness.database, move_after_seconds=30.0, monotonic=lambda: now)
    coordinator.run_once()
    # Nothing was observed for long: the leases may be unchanged because of the outage.
    now = 1000.0
    coordinator.run_once()
    assert current_groups(harness) == {"", "two"}
    # The first group renews its lease, the other one does not.
    for step in range(1, 8):
        now = 1000.0 + 5.0 * step
        renew(harness, "", until=now)
        coordinator.run_once()
    assert current_groups(harness) == {""}
    coordinator.close()


def register(harness: WorkerHarness, group_id: str) -> None:
    group = GroupRecord(
        id=group_id,
        state=GroupState.READY,
        base_models=[{"name": BASE_MODEL}],
        models_source="",
        host="here",
        load={},
        started_at=0.0,
        seen_at=0.0,
    )

    def work(db: Connection) -> None:
        groups.register(db, group)
        coordination.acquire_lease(db, coordination.group_lease(group_id), "test", until=1.0)

    harness.database.write(work)


def renew(harness: WorkerHarness, group_id: str, until: float) -> None:
    name = coordination.group_lease(group_id)
    assert harness.database.write(lambda db: coordination.renew_lease(db, name, 1, until=until))


def current_groups(harness: WorkerHarness) -> set[str]:
    return {group.id for group in harness.read(groups.list_current)}


# --- tenants -------------------------------------------------------------------------------------
def models_in_groups(harness: WorkerHarness, tenant_name: str = "alice") -> list[str]:
    """Return a tenant's models, one in each of the groups "" and "two"."""
    tenant = harness.tenant(tenant_name)
    session = harness.session(tenant)
    models = [harness.model(tenant, session, number) for number in range(2)]
    place(harness, models[1], "two")
    return models


def test_queue_limit_of_a_tenant_counts_all_groups(harness: WorkerHarness) -> None:
    models = models_in_groups(harness)
    for run_id in models:
        harness.optim_step(run_id, 1)
    # Two unfinished creations and two steps; every API process refuses the next one.
    with closing(Database(harness.url)) as other:
        for database, run_id in zip((harness.database, other), models, strict=True):
            harness.queue.close()
            harness.queue = JobQueue(database, QueueLimits(max_jobs_per_tenant=4), b"secret")
            with pytest.raises(RateLimitError, match="4 of your requests are waiting"):
                harness.optim_step(run_id, 2)
        harness.queue.close()


def test_token_quota_counts_all_groups(
    harness: WorkerHarness, start: Callable[..., GroupWorker]
) -> None:
    models = models_in_groups(harness)
    for group_id in ("", "two"):
        start(group_id)
    for run_id in models:
        harness.result(harness.forward_backward(run_id, 1, TOKENS))
    # Each group has trained half of them.
    quotas = QuotaChecks(Quotas(tokens_per_hour=2 * (len(TOKENS) - 1)))
    harness.queue.close()
    harness.queue = JobQueue(harness.database, QueueLimits(), b"secret", quotas)
    for run_id in models:
        with pytest.raises(RateLimitError, match="14 of 14 tokens of this hour are used"):
            harness.op(run_id, 2, JobKind.FORWARD_BACKWARD, b"", num_tokens=1)


def test_storage_quota_counts_checkpoints_of_all_groups(
    harness: WorkerHarness, start: Callable[..., GroupWorker]
) -> None:
    models = models_in_groups(harness)
    quotas = QuotaChecks(Quotas(checkpoints=2))
    for group_id in ("", "two"):
        start(group_id, quotas=quotas)
    harness.result(harness.save(models[0], 1, "a"))
    harness.result(harness.save(models[1], 1, "b"))
    for run_id in models:
        refused = harness.outcome(harness.save(run_id, 2, "c")).job
        assert "2 of 2 checkpoints" in str(refused.error)


def test_flood_on_two_groups_does_not_delay_another_tenant(
    harness: WorkerHarness, start: Callable[..., GroupWorker]
) -> None:
    floods, others = models_in_groups(harness, "flood"), models_in_groups(harness, "other")
    waiting = {
        run_id: [harness.optim_step(run_id, seq) for seq in range(1, 60)] for run_id in floods
    }
    short = [harness.optim_step(run_id, 1) for run_id in others]
    for group_id in ("", "two"):
        start(group_id, seconds_per_op=0.01)
    for job, flood in zip(short, waiting.values(), strict=True):
        finished_at = harness.outcome(job).job.finished_at
        before = [
            one for one in flood if (harness.outcome(one).job.finished_at or 0.0) <= finished_at
        ]
        # The tenants of a group take turns: two operations each, and what shares their commits.
        assert len(before) < len(flood) / 2


def test_long_passes_are_preempted_in_every_group(
    harness: WorkerHarness, start: Callable[..., GroupWorker]
) -> None:
    engines = [GatedEngine(), GatedEngine()]
    heavy, light = models_in_groups(harness, "heavy"), models_in_groups(harness, "light")
    for group_id, engine in zip(("", "two"), engines, strict=True):
        start(group_id, engine=engine)
    long = [harness.forward_backward(run_id, 1, LONG) for run_id in heavy]
    for engine in engines:
        assert engine.began.wait(60)
    short = [harness.forward_backward(run_id, 1, SHORT) for run_id in light]
    for engine, job in zip(engines, short, strict=True):
        engine.permits.release()
        harness.result(job)
        assert engine.num_steps == 1
    for job in long:
        assert not harness.queue.find(job.tenant_id, job.id).is_finished
    for engine in engines:
        engine.permits.release(100)
    results = [harness.result(job) for job in long]
    assert results[0] == results[1]
