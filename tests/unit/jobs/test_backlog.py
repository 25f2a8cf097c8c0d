"""Fair over tenants, in order within a model."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tinkex.jobs.backlog import Backlog, TurnLimits
from tinkex.jobs.kinds import Kind
from tinkex.store.records import Job

LIMITS = TurnLimits(max_pass_bytes=1000, max_passes=4, gap_seconds=10.0)
_numbers = iter(range(1, 10**9))


def job(
    tenant: str, run_id: str | None, position: int, kind: Kind = Kind.OPTIM_STEP, **options: Any
) -> Job:
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
    return Job(**{**fields, **options})


def backlog_of(*jobs: Job) -> Backlog:
    backlog = Backlog(LIMITS)
    for item in jobs:
        backlog.add(item)
    return backlog


def drain(backlog: Backlog, now: float = 0.0) -> list[Job]:
    done = []
    while turn := backlog.take_turn(now):
        done += turn
        for item in turn:
            backlog.finish(item)
    return done


@given(st.permutations(range(6)))
def test_a_models_work_runs_by_number_whatever_the_order_of_arrival(order: list[int]) -> None:
    backlog = backlog_of(*(job("a", "m", position) for position in order))
    assert [item.position for item in drain(backlog)] == list(range(6))
    assert len(backlog) == 0


def test_work_after_a_gap_waits_for_the_missing_number_and_then_no_more() -> None:
    backlog = backlog_of(job("a", "m", 0), job("a", "m", 2))
    assert [item.position for item in drain(backlog, now=5.0)] == [0]
    assert backlog.next_look(5.0) == LIMITS.gap_seconds
    assert [item.position for item in drain(backlog, now=10.0)] == [2]


def test_a_late_number_still_runs() -> None:
    backlog = backlog_of(job("a", "m", 3))
    assert [item.position for item in drain(backlog, now=10.0)] == [3]
    backlog.add(job("a", "m", 1), 4)
    assert [item.position for item in drain(backlog)] == [1]


def test_a_model_runs_one_thing_at_a_time() -> None:
    backlog = backlog_of(job("a", "m", 0), job("a", "m", 1))
    first = backlog.take_turn(0.0)
    assert [item.position for item in first] == [0]
    assert backlog.take_turn(0.0) == []
    backlog.finish(first[0])
    assert [item.position for item in backlog.take_turn(0.0)] == [1]


def test_tenants_take_turns_however_much_one_has_waiting() -> None:
    flood = [job("loud", f"loud-{index}", 0) for index in range(50)]
    backlog = backlog_of(*flood, job("quiet", "q", 0), job("quiet", "q", 1))
    order = [item.tenant_id for item in drain(backlog)[:4]]
    assert order == ["loud", "quiet", "loud", "quiet"]


def test_who_comes_back_goes_before_those_who_were_served_since() -> None:
    backlog = backlog_of(*(job("loud", f"loud-{index}", 0) for index in range(5)))
    backlog.add(job("quiet", "q", 0))
    order = []
    for number in range(1, 4):
        for _ in range(2):
            (taken,) = backlog.take_turn(0.0)
            order.append(taken.tenant_id)
            backlog.finish(taken)
            if taken.tenant_id == "loud":
                # It comes back while the loud one is being served, as a client would.
                backlog.add(job("quiet", "q", number), number)
    assert order == ["loud", "quiet"] * 3


def test_a_tenants_models_take_turns() -> None:
    backlog = backlog_of(
        *(job("a", run_id, position) for run_id in ("x", "y") for position in range(3))
    )
    assert [item.run_id for item in drain(backlog)] == ["x", "y", "x", "y", "x", "y"]


def test_passes_of_several_models_share_a_turn_within_the_limits() -> None:
    passes = [job(f"t{index}", f"m{index}", 0, Kind.FORWARD_BACKWARD) for index in range(6)]
    backlog = backlog_of(*passes)
    assert [len(backlog.take_turn(0.0)) for _ in range(2)] == [LIMITS.max_passes, 2]


def test_a_large_pass_runs_alone() -> None:
    large = [
        job(f"t{index}", f"m{index}", 0, Kind.FORWARD_BACKWARD, payload_bytes=5000)
        for index in range(2)
    ]
    backlog = backlog_of(*large)
    assert [len(backlog.take_turn(0.0)) for _ in range(2)] == [1, 1]


def test_an_operation_never_shares_a_turn_with_passes() -> None:
    backlog = backlog_of(
        job("a", "x", 0, Kind.FORWARD_BACKWARD),
        job("b", "y", 0, Kind.OPTIM_STEP),
        job("c", "z", 0, Kind.FORWARD),
    )
    turns = [[item.kind for item in backlog.take_turn(0.0)] for _ in range(2)]
    assert sorted(map(len, turns)) == [1, 2]
    assert [Kind.OPTIM_STEP] in turns


def test_samples_are_taken_one_of_each_tenant_in_turn() -> None:
    backlog = backlog_of(
        *(job("loud", None, index, Kind.SAMPLE) for index in range(10)),
        job("quiet", None, 0, Kind.SAMPLE),
    )
    assert [item.tenant_id for item in backlog.take_samples(3)] == ["loud", "quiet", "loud"]
    assert len(backlog.take_samples(100)) == 8
    assert backlog.take_samples(1) == []


def test_a_sample_that_a_worker_died_of_is_drawn_alone() -> None:
    first, again, last = (
        job("a", None, index, Kind.SAMPLE, attempts=index % 2) for index in range(3)
    )
    backlog = backlog_of(first, again, last)
    assert backlog.take_samples(5) == [first]
    assert backlog.take_samples(5, is_idle=False) == []
    assert backlog.take_samples(5) == [again]
    assert backlog.take_samples(5) == [last]


def test_a_cancelled_sample_is_not_taken() -> None:
    wanted, unwanted = (job("a", None, index, Kind.SAMPLE) for index in range(2))
    backlog = backlog_of(wanted, unwanted)
    backlog.drop([unwanted.id, "job-nobody-knows"])
    assert backlog.take_samples(5) == [wanted]
    assert len(backlog) == 0


def test_the_same_job_is_taken_in_once() -> None:
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
def test_everything_runs_once_and_every_model_in_order(
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


def test_a_tenant_whose_samples_are_served_keeps_its_turn_to_train() -> None:
    samples = [job("a", None, place, Kind.SAMPLE) for place in range(20)]
    steps = [job(tenant, f"model-{tenant}", place) for place in range(20) for tenant in "ab"]
    backlog = backlog_of(*samples, *steps)
    served = []
    for _ in range(10):
        assert [item.tenant_id for item in backlog.take_samples(1)] == ["a"]
        (item,) = backlog.take_turn(0.0)
        backlog.finish(item)
        served.append(item.tenant_id)
    assert sorted(served) == ["a"] * 5 + ["b"] * 5


def test_work_that_a_worker_died_of_takes_nobody_with_it() -> None:
    suspect = job("a", "one", 0, Kind.FORWARD, attempts=1)
    others = [job("b", "two", 0, Kind.FORWARD), job("c", "three", 0, Kind.FORWARD)]
    for jobs in ([suspect, *others], [*others, suspect]):
        backlog = backlog_of(*jobs)
        turns = [backlog.take_turn(0.0), backlog.take_turn(0.0)]
        assert sorted(map(len, turns)) == [1, 2]
        assert [suspect] in turns
