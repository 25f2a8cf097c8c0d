"""The fair queue: fair between tenants, in order within a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tinkex.jobs.fair_queue import BatchLimits, FairQueue
from tinkex.jobs.job_types import JobKind
from tinkex.store.records import JobRecord

LIMITS = BatchLimits(max_pass_bytes=1000, max_passes=4, gap_seconds=10.0)
_numbers = iter(range(1, 10**9))


def job(
    tenant: str,
    run_id: str | None,
    position: int,
    kind: JobKind = JobKind.OPTIM_STEP,
    **options: Any,
) -> JobRecord:
    no = next(_numbers)
    fields: dict[str, Any] = {
        "no": no,
        "id": f"job-{no}",
        "tenant_id": tenant,
        "session_id": "session",
        "kind": kind,
        "run_id": run_id,
        "sampler_id": None,
        "position": position,
        "state": "queued",
        "attempts": 0,
        "payload_bytes": 100,
        "is_proto": False,
        "result_bytes": 0,
        "error": None,
        "category": None,
        "applied": None,
        "num_sequences": 0,
        "created_at": 0.0,
        "started_at": None,
        "finished_at": None,
        "fetched_at": None,
    }
    return JobRecord(**{**fields, **options})


def backlog_of(*jobs: JobRecord) -> FairQueue:
    backlog = FairQueue(LIMITS)
    for item in jobs:
        backlog.add(item)
    return backlog


def take_samples(
    backlog: FairQueue, num_free: int, running: Sequence[JobRecord] = ()
) -> list[JobRecord]:
    return backlog.next_samples(num_free, running, max_running=0)


def drain(backlog: FairQueue, now: float = 0.0) -> list[JobRecord]:
    done = []
    while turn := backlog.next_batch(now):
        done += turn
        for item in turn:
            backlog.finish(item)
    return done


@given(st.permutations(range(6)))
def test_jobs_of_model_run_in_seq_id_order(order: list[int]) -> None:
    backlog = backlog_of(*(job("a", "m", position) for position in order))
    assert [item.position for item in drain(backlog)] == list(range(6))
    assert len(backlog) == 0


def test_seq_id_gap_is_waited_for_with_timeout() -> None:
    backlog = backlog_of(job("a", "m", 0), job("a", "m", 2))
    assert [item.position for item in drain(backlog, now=5.0)] == [0]
    assert backlog.next_poll_at() == LIMITS.gap_seconds
    assert [item.position for item in drain(backlog, now=10.0)] == [2]


def test_late_seq_id_still_runs() -> None:
    backlog = backlog_of(job("a", "m", 3))
    assert [item.position for item in drain(backlog, now=10.0)] == [3]
    backlog.add(job("a", "m", 1), 4)
    assert [item.position for item in drain(backlog)] == [1]


def test_model_runs_one_job_at_a_time() -> None:
    backlog = backlog_of(job("a", "m", 0), job("a", "m", 1))
    first = backlog.next_batch(0.0)
    assert [item.position for item in first] == [0]
    assert backlog.next_batch(0.0) == []
    backlog.finish(first[0])
    assert [item.position for item in backlog.next_batch(0.0)] == [1]


def test_tenants_are_served_round_robin() -> None:
    flood = [job("loud", f"loud-{index}", 0) for index in range(50)]
    backlog = backlog_of(*flood, job("quiet", "q", 0), job("quiet", "q", 1))
    order = [item.tenant_id for item in drain(backlog)[:4]]
    assert order == ["loud", "quiet", "loud", "quiet"]


def test_returning_tenant_goes_first() -> None:
    backlog = backlog_of(*(job("loud", f"loud-{index}", 0) for index in range(5)))
    backlog.add(job("quiet", "q", 0))
    order = []
    for number in range(1, 4):
        for _ in range(2):
            (taken,) = backlog.next_batch(0.0)
            order.append(taken.tenant_id)
            backlog.finish(taken)
            if taken.tenant_id == "loud":
                # It returns while the busy tenant is being served.
                backlog.add(job("quiet", "q", number), number)
    assert order == ["loud", "quiet"] * 3


def test_models_of_tenant_are_served_round_robin() -> None:
    backlog = backlog_of(
        *(job("a", run_id, position) for run_id in ("x", "y") for position in range(3))
    )
    assert [item.run_id for item in drain(backlog)] == ["x", "y", "x", "y", "x", "y"]


def test_passes_of_several_models_share_batch_within_limits() -> None:
    passes = [job(f"t{index}", f"m{index}", 0, JobKind.FORWARD_BACKWARD) for index in range(6)]
    backlog = backlog_of(*passes)
    assert [len(backlog.next_batch(0.0)) for _ in range(2)] == [LIMITS.max_passes, 2]


def test_pass_with_large_payload_is_batched_alone() -> None:
    large = [
        job(f"t{index}", f"m{index}", 0, JobKind.FORWARD_BACKWARD, payload_bytes=5000)
        for index in range(2)
    ]
    backlog = backlog_of(*large)
    assert [len(backlog.next_batch(0.0)) for _ in range(2)] == [1, 1]


def test_operation_is_not_batched_with_passes() -> None:
    backlog = backlog_of(
        job("a", "x", 0, JobKind.FORWARD_BACKWARD),
        job("b", "y", 0, JobKind.OPTIM_STEP),
        job("c", "z", 0, JobKind.FORWARD),
    )
    turns = [[item.kind for item in backlog.next_batch(0.0)] for _ in range(2)]
    assert sorted(map(len, turns)) == [1, 2]
    assert [JobKind.OPTIM_STEP] in turns


def test_samples_are_taken_round_robin() -> None:
    backlog = backlog_of(
        *(job("loud", None, index, JobKind.SAMPLE) for index in range(10)),
        job("quiet", None, 0, JobKind.SAMPLE),
    )
    assert [item.tenant_id for item in take_samples(backlog, 3)] == ["loud", "quiet", "loud"]
    assert len(take_samples(backlog, 100)) == 8
    assert take_samples(backlog, 1) == []


def test_sample_that_crashed_worker_is_isolated() -> None:
    first, again, last = (
        job("a", None, index, JobKind.SAMPLE, attempts=index % 2) for index in range(3)
    )
    backlog = backlog_of(first, again, last)
    assert take_samples(backlog, 5) == [first]
    assert take_samples(backlog, 5, running=[first]) == []
    assert take_samples(backlog, 5) == [again]
    assert take_samples(backlog, 5) == [last]


def test_cancelled_sample_is_not_started() -> None:
    wanted, unwanted = (job("a", None, index, JobKind.SAMPLE) for index in range(2))
    backlog = backlog_of(wanted, unwanted)
    backlog.cancel([unwanted.id, "job-nobody-knows"])
    assert take_samples(backlog, 5) == [wanted]
    assert len(backlog) == 0


def test_duplicate_job_is_queued_once() -> None:
    item = job("a", "m", 0)
    backlog = backlog_of(item, item)
    assert drain(backlog) == [item]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 5)),
        unique=True,
        max_size=40,
    )
)
def test_all_jobs_run_once_and_in_order_per_model(
    work: list[tuple[str, str, int]],
) -> None:
    backlog = backlog_of(*(job(tenant, tenant + run, seq) for tenant, run, seq in work))
    done = drain(backlog, now=100.0)
    assert sorted((item.tenant_id, item.run_id, item.position) for item in done) == sorted(
        (tenant, tenant + run, seq) for tenant, run, seq in work
    )
    for name in {item.run_id for item in done}:
        positions = [item.position for item in done if item.run_id == name]
        assert positions == sorted(positions)


def test_sampling_does_not_use_training_turn() -> None:
    samples = [job("a", None, place, JobKind.SAMPLE) for place in range(20)]
    steps = [job(tenant, f"model-{tenant}", place) for place in range(20) for tenant in "ab"]
    backlog = backlog_of(*samples, *steps)
    served = []
    for _ in range(10):
        assert [item.tenant_id for item in take_samples(backlog, 1)] == ["a"]
        (item,) = backlog.next_batch(0.0)
        backlog.finish(item)
        served.append(item.tenant_id)
    assert sorted(served) == ["a"] * 5 + ["b"] * 5


def test_job_that_crashed_worker_is_isolated() -> None:
    suspect = job("a", "one", 0, JobKind.FORWARD, attempts=1)
    others = [job("b", "two", 0, JobKind.FORWARD), job("c", "three", 0, JobKind.FORWARD)]
    for jobs in ([suspect, *others], [*others, suspect]):
        backlog = backlog_of(*jobs)
        turns = [backlog.next_batch(0.0), backlog.next_batch(0.0)]
        assert sorted(map(len, turns)) == [1, 2]
        assert [suspect] in turns


# --- long passes -----------------------------------------------------------------------------
def long_pass(tenant: str, run_id: str, position: int = 0, **options: Any) -> JobRecord:
    tokens = {"num_tokens": 10 * LIMITS.max_pass_tokens, **options}
    return job(tenant, run_id, position, JobKind.FORWARD_BACKWARD, **tokens)


def short_pass(tenant: str, run_id: str, position: int = 0) -> JobRecord:
    return job(tenant, run_id, position, JobKind.FORWARD_BACKWARD, num_tokens=10)


def step(backlog: FairQueue, done: dict[str, int]) -> list[JobRecord]:
    """Run one batch like the worker: a long pass takes ten micro-batches."""
    turn = backlog.next_batch(0.0)
    for item in turn:
        done[item.id] = done.get(item.id, 0) + min(item.num_tokens, LIMITS.max_pass_tokens)
        if done[item.id] < item.num_tokens:
            backlog.suspend(item, done[item.id])
        else:
            backlog.finish(item)
    return turn


def test_light_tenant_runs_after_current_micro_batch() -> None:
    long, done = long_pass("heavy", "h"), dict[str, int]()
    backlog = backlog_of(long)
    for _ in range(3):
        assert step(backlog, done) == [long]
    work = [short_pass("light", "l", 0), job("light", "l", 1), short_pass("light", "l", 2)]
    for item in work:
        backlog.add(item)
    assert [step(backlog, done) for _ in range(3)] == [[item] for item in work]
    assert step(backlog, done) == [long]


def test_long_pass_is_batched_alone() -> None:
    backlog = backlog_of(long_pass("heavy", "h"), short_pass("light", "l"), short_pass("o", "o"))
    turns = [backlog.next_batch(0.0) for _ in range(2)]
    assert sorted(map(len, turns)) == [1, 2]


def test_tenants_with_long_passes_get_equal_tokens() -> None:
    backlog, done = backlog_of(long_pass("a", "x"), long_pass("b", "y")), dict[str, int]()
    served = [step(backlog, done)[0].tenant_id for _ in range(20)]
    assert served[:10].count("a") == 5
    assert len(backlog) == 0


def test_fairness_counts_tokens_not_requests() -> None:
    sizes = {"many": 100, "few": 400}
    done, served = dict[str, int](), dict.fromkeys(sizes, 0)
    backlog = backlog_of(
        *(
            job(name, f"{name}-{index}", 0, JobKind.FORWARD, num_tokens=size)
            for name, size in sizes.items()
            for index in range(200)
        )
    )
    for _ in range(20):
        for item in step(backlog, done):
            served[item.tenant_id] += item.num_tokens
    assert abs(served["many"] - served["few"]) <= 2 * LIMITS.max_pass_tokens


def test_model_with_suspended_pass_runs_nothing_else() -> None:
    first, second = long_pass("a", "m", 0), job("a", "m", 1)
    backlog, done = backlog_of(first, second), dict[str, int]()
    turns = [step(backlog, done) for _ in range(11)]
    assert turns == [[first]] * 10 + [[second]]


def test_short_jobs_alternate_with_long_pass_of_same_tenant() -> None:
    long = long_pass("a", "m")
    backlog, done = backlog_of(long), dict[str, int]()
    assert step(backlog, done) == [long]
    short = [short_pass("a", "n", position) for position in range(3)]
    for item in short:
        backlog.add(item)
    turns = [step(backlog, done)[0] for _ in range(6)]
    assert [item for item in turns if item is not long] == short
    assert turns.count(long) == 3


def test_long_pass_that_crashed_worker_runs_alone() -> None:
    suspect, other = long_pass("a", "x", attempts=1), long_pass("b", "y")
    backlog, done = backlog_of(suspect), dict[str, int]()
    assert step(backlog, done) == [suspect]
    backlog.add(other)
    short = short_pass("c", "z")
    backlog.add(short)
    turns = [step(backlog, done)[0] for _ in range(20)]
    assert turns.index(other) > max(place for place, one in enumerate(turns) if one is suspect)
    assert turns[0] is short
    # And the other way round.
    backlog, done = backlog_of(other), dict[str, int]()
    step(backlog, done)
    backlog.add(suspect)
    turns = [step(backlog, done)[0] for _ in range(19)]
    assert turns == [other] * 9 + [suspect] * 10


def test_cancelled_waiting_pass_keeps_its_position() -> None:
    work = [short_pass("a", "m", position) for position in range(3)]
    backlog = backlog_of(*work)
    backlog.cancel([work[1].id])
    assert [backlog.is_cancelled(item) for item in work] == [False, True, False]
    assert drain(backlog) == work


def test_gap_timeout_starts_when_next_seq_id_is_seen() -> None:
    backlog = FairQueue(LIMITS)
    # Its creation time may be in the past, e.g. before a restart.
    backlog.add(job("a", "m", 1, created_at=-1e9), 0, now=100.0)
    assert backlog.next_batch(100.0 + LIMITS.gap_seconds - 0.1) == []
    assert len(backlog.next_batch(100.0 + LIMITS.gap_seconds)) == 1


# --- samples of several sources --------------------------------------------------------------
def sample(tenant: str, sampler: str, **options: Any) -> JobRecord:
    return job(tenant, None, 0, JobKind.SAMPLE, sampler_id=sampler, num_tokens=8, **options)


def test_sampling_sessions_of_tenant_are_served_round_robin() -> None:
    flood = [sample("a", "one") for _ in range(6)]
    other = sample("a", "two")
    backlog = backlog_of(*flood, other)
    assert take_samples(backlog, 2) == [flood[0], other]


def test_tenant_or_source_without_sample_starts_one_without_free_slot() -> None:
    running = [sample("a", "one") for _ in range(4)]
    waiting = [sample("a", "one"), sample("a", "two"), sample("b", "three"), sample("b", "three")]
    backlog = backlog_of(*waiting)
    taken = backlog.next_samples(0, running, max_running=4)
    assert sorted(item.sampler_id or "" for item in taken) == ["three", "two"]
    # The number is limited, regardless of the number of sources.
    crowd = backlog_of(*(sample("a", f"source-{index}") for index in range(20)))
    assert len(crowd.next_samples(0, running, max_running=4)) == 2
    crowd.add(sample("b", "late"))
    taken = crowd.next_samples(0, [*running, *running[:2]], max_running=4)
    assert [item.tenant_id for item in taken] == ["b"]


def test_samples_are_charged_by_used_tokens() -> None:
    backlog = backlog_of(
        *(job("long", None, 0, JobKind.SAMPLE, num_tokens=100, sampler_id="l") for _ in range(20)),
        *(job("short", None, 0, JobKind.SAMPLE, num_tokens=10, sampler_id="s") for _ in range(40)),
    )
    taken = take_samples(backlog, 22)
    assert [item.tenant_id for item in taken].count("long") == 2
    for item in taken:
        if item.tenant_id == "long":
            backlog.finish_sample(item, 10)
    assert [item.tenant_id for item in take_samples(backlog, 2)] == ["long", "long"]
