from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.cluster.plan import (
    LOST_SECONDS,
    RETRY_SECONDS,
    SCALE_DOWN_SECONDS,
    SCALE_UP_SECONDS,
    SURGE_SECONDS,
    WAITING_SECONDS,
    Action,
    ActionKind,
    GroupFacts,
    PoolSize,
    Scaling,
    plan_pool,
    plan_stop,
    scale,
)
from tinkex.store.records import GroupState

SIZE = PoolSize(1, 4)
START = Action(ActionKind.START)
REMOVE_A = Action(ActionKind.REMOVE, "a")


def ready(group_id: str, **values: object) -> GroupFacts:
    facts = GroupFacts(group_id, state=GroupState.READY, base_models=frozenset({"m"}))
    return facts._replace(**values)


def run_scale(state: Scaling, *, queued: float, busy: float, start: float, end: float) -> Scaling:
    """Observe the same load every second."""
    now = start
    while now <= end:
        state = scale(state, SIZE, queued_seconds=queued, busy=busy, now=now)
        now += 1.0
    return state


# --- scaling ------------------------------------------------------------------------------------
def test_pool_grows_after_a_long_queue_of_15_seconds() -> None:
    early = run_scale(Scaling(1), queued=35, busy=1, start=0, end=SCALE_UP_SECONDS - 1)
    assert early.num_wanted == 1
    late = run_scale(early, queued=35, busy=1, start=SCALE_UP_SECONDS, end=SCALE_UP_SECONDS)
    assert late.num_wanted == 4


def test_short_burst_does_not_grow_a_pool() -> None:
    state = run_scale(Scaling(1), queued=35, busy=1, start=0, end=10)
    state = run_scale(state, queued=5, busy=1, start=11, end=11)
    assert run_scale(state, queued=35, busy=1, start=12, end=20).num_wanted == 1


def test_idle_pool_shrinks_one_by_one() -> None:
    state = run_scale(Scaling(3), queued=0, busy=0.1, start=0, end=SCALE_DOWN_SECONDS)
    assert state.num_wanted == 2
    state = run_scale(state, queued=0, busy=0.1, start=301, end=599)
    assert state.num_wanted == 2
    assert run_scale(state, queued=0, busy=0.1, start=600, end=2000).num_wanted == 1


def test_busy_pool_does_not_shrink() -> None:
    assert run_scale(Scaling(3), queued=0, busy=0.5, start=0, end=1000).num_wanted == 3


@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1), st.floats(0, 400)), max_size=30),
)
def test_wanted_number_stays_within_the_limits(
    number: int, loads: list[tuple[float, float, float]]
) -> None:
    state, now = Scaling(number), 0.0
    for queued, busy, seconds in loads:
        now += seconds
        state = scale(state, SIZE, queued_seconds=queued, busy=busy, now=now)
        assert 1 <= state.num_wanted <= 4


# --- groups -------------------------------------------------------------------------------------
def test_missing_groups_are_started() -> None:
    assert plan_pool([], 2) == [START, START]
    assert plan_pool([GroupFacts("a")], 2) == [START]
    assert plan_pool([ready("a"), ready("b")], 2) == []


def test_groups_that_the_cluster_lost_are_restored_with_their_models() -> None:
    lost = [ready("a", is_started=False, num_runs=1), ready("b", is_started=False, num_runs=5)]
    assert plan_pool(lost, 1) == [Action(ActionKind.RESTORE, "b")]
    assert plan_pool([*lost, ready("c")], 1) == []
    retired = GroupFacts("r", is_started=False, state=GroupState.RETIRED)
    assert plan_pool([retired], 1) == [START]


def test_drained_and_retired_groups_are_removed_and_replaced() -> None:
    retired = GroupFacts("a", state=GroupState.RETIRED)
    ended = ready("b", has_ended=True)
    assert plan_pool([retired, ended], 1) == [
        Action(ActionKind.REMOVE, "a"),
        Action(ActionKind.REMOVE, "b"),
        START,
    ]


def test_group_that_is_not_heard_of_is_placed_anew() -> None:
    lost = ready("a", lost_seconds=LOST_SECONDS - 1)
    assert plan_pool([lost], 1) == []
    assert plan_pool([lost._replace(lost_seconds=LOST_SECONDS)], 1) == [REMOVE_A]
    waiting = GroupFacts("a", waiting_seconds=WAITING_SECONDS - 1)
    assert plan_pool([waiting], 1) == []
    assert plan_pool([waiting._replace(waiting_seconds=WAITING_SECONDS)], 1) == [REMOVE_A]


def test_group_that_cannot_start_is_tried_again_later() -> None:
    failed = GroupFacts("a", has_ended=True, failed_seconds=1.0)
    assert Action(ActionKind.REMOVE, "a") not in plan_pool([failed], 1)
    late = failed._replace(failed_seconds=RETRY_SECONDS)
    assert Action(ActionKind.REMOVE, "a") in plan_pool([late], 1)


def test_surplus_groups_are_drained_one_at_a_time_least_used_first() -> None:
    groups = [ready("a", num_runs=3), ready("b", num_runs=1), ready("c", queued_seconds=9.0)]
    assert plan_pool(groups, 1) == [Action(ActionKind.DRAIN, "b")]
    draining = [groups[0], groups[1]._replace(state=GroupState.DRAINING), groups[2]]
    assert plan_pool(draining, 1) == []


def test_last_group_of_a_base_model_is_not_drained() -> None:
    groups = [ready("a"), ready("b", base_models=frozenset({"m", "rare"}), num_runs=0)]
    assert plan_pool(groups, 1) == [Action(ActionKind.DRAIN, "a")]
    only = [ready("a", base_models=frozenset({"x"})), ready("b", base_models=frozenset({"y"}))]
    assert plan_pool(only, 1) == []


def test_outdated_group_is_drained_after_its_replacement_is_ready() -> None:
    old = ready("old", is_current=False)
    assert plan_pool([old], 1) == [START]
    assert plan_pool([old, GroupFacts("new")], 1) == []
    assert plan_pool([old, ready("new")], 1) == [Action(ActionKind.DRAIN, "old")]
    gone = GroupFacts("old", is_current=False, state=GroupState.RETIRED)
    assert plan_pool([gone, ready("new")], 1) == [Action(ActionKind.REMOVE, "old")]


def test_outdated_group_makes_room_for_a_replacement_without_resources() -> None:
    old = [ready("a", is_current=False), ready("b", is_current=False)]
    waiting = GroupFacts("new", waiting_seconds=SURGE_SECONDS)
    assert plan_pool([*old, waiting._replace(waiting_seconds=1.0)], 2) == []
    assert plan_pool([*old, waiting], 2) == [Action(ActionKind.DRAIN, "a")]
    # The only group of a pool keeps its models.
    assert plan_pool([old[0], waiting], 1) == []


def test_stopped_pool_is_stopped_and_then_removed() -> None:
    groups = [ready("a"), ready("b", has_ended=True), ready("c", is_started=False)]
    assert plan_stop(groups) == [Action(ActionKind.STOP, "a"), Action(ActionKind.REMOVE, "b")]


@given(st.integers(1, 5), st.integers(0, 12))
def test_rolling_restart_ends_with_current_groups_only(num_wanted: int, num_outdated: int) -> None:
    """Execute plans until nothing is left to do; the number of ready groups never falls."""
    groups = {f"old-{n}": ready(f"old-{n}", is_current=False) for n in range(num_outdated)}
    for step in range(200):
        actions = plan_pool(list(groups.values()), num_wanted)
        if not actions:
            break
        for number, action in enumerate(actions):
            if action.kind == ActionKind.START:
                groups[f"new-{step}-{number}"] = ready(f"new-{step}-{number}")
            else:
                del groups[action.group_id]
        num_ready = sum(group.is_ready for group in groups.values())
        assert num_ready >= min(num_wanted, num_outdated or num_wanted)
    assert all(group.is_current for group in groups.values())
    assert len(groups) == num_wanted
