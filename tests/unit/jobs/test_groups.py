"""Placement of models and samples on groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.jobs.groups import (
    OVERLOAD_SECONDS,
    REBALANCE_SECONDS,
    GroupView,
    Placement,
    choose_receiver,
    choose_victims,
    ready_views,
)
from tinkex.store.records import GroupRecord, GroupState

MODEL = "m"


def view(
    name: str, queued_seconds: float = 0.0, num_runs: int = 0, model: str = MODEL
) -> GroupView:
    return GroupView(name, frozenset({model}), queued_seconds, num_runs)


def record(name: str, state: GroupState, seen_at: float = 0.0) -> GroupRecord:
    return GroupRecord(
        id=name,
        state=state,
        base_models=[{"name": MODEL}],
        models_source="",
        host="here",
        load={"queued_seconds": 2.5, "num_runs": 3.0},
        started_at=0.0,
        seen_at=seen_at,
    )


names = st.text("abcdefgh0123456789-", min_size=1, max_size=12)
group_lists = st.lists(names, min_size=1, max_size=20, unique=True).map(
    lambda ids: [view(name) for name in ids]
)


def test_only_ready_groups_that_are_alive_take_work() -> None:
    records = [
        record("a", GroupState.READY, 10.0),
        record("b", GroupState.DRAINING, 10.0),
        record("c", GroupState.READY, 1.0),
    ]
    assert [one.id for one in ready_views(records)] == ["a", "c"]
    assert ready_views(records, alive_since=5.0) == [view("a", 2.5, 3)]


@given(group_lists, names)
def test_placement_needs_a_group_that_serves_the_model(groups: list[GroupView], key: str) -> None:
    assert Placement(groups).place_run(key, "other") is None
    assert Placement(groups).place_sample(key, "other") is None
    assert Placement(groups).place_run(key, MODEL) in {group.id for group in groups}


@given(group_lists, names)
def test_placement_does_not_depend_on_the_order_of_groups(
    groups: list[GroupView], key: str
) -> None:
    assert Placement(groups).place_sample(key, MODEL) == Placement(groups[::-1]).place_sample(
        key, MODEL
    )
    records = [record(group.id, GroupState.READY) for group in groups]
    assert ready_views(records) == ready_views(records[::-1])


@given(group_lists, names, names)
def test_a_group_that_leaves_moves_only_its_own_samples(
    groups: list[GroupView], key: str, leaver: str
) -> None:
    before = Placement(groups).place_sample(key, MODEL)
    remaining = [group for group in groups if group.id != leaver]
    if before != leaver:
        assert Placement(remaining).place_sample(key, MODEL) == before


def test_the_less_loaded_of_two_groups_gets_a_model() -> None:
    assert Placement([view("a", 3.0), view("b", 0.0)]).place_run("run", MODEL) == "b"
    assert Placement([view("a", 0.0, 1), view("b", 0.0, 2)]).place_run("run", MODEL) == "a"


def test_samples_avoid_an_overloaded_group() -> None:
    free = [view("a"), view("b")]
    chosen = Placement(free).place_sample("sampler", MODEL)
    loaded = [group._replace(queued_seconds=OVERLOAD_SECONDS) for group in free]
    loaded = [group if group.id == chosen else view(group.id) for group in loaded]
    assert Placement(loaded).place_sample("sampler", MODEL) != chosen
    # If all are overloaded, the preferred one has the caches.
    busy = [group._replace(queued_seconds=9.0) for group in free]
    assert Placement(busy).place_sample("sampler", MODEL) == chosen


@pytest.mark.parametrize("num_groups", [2, 7, 100])
def test_models_are_spread_evenly(num_groups: int) -> None:
    groups = [view(f"g{number}") for number in range(num_groups)]
    runs = {f"run-{number}": MODEL for number in range(100 * num_groups)}
    counts = Counter({group: len(ids) for group, ids in Placement(groups).place_runs(runs).items()})
    assert counts.total() == len(runs)
    # Two choices: expected maximum is the mean plus a few.
    assert max(counts.values()) <= 110


def test_models_placed_since_the_last_report_count() -> None:
    groups = [view("a"), view("b")]
    placement = Placement(groups, {"a": 3})
    targets = [placement.place_run(f"run-{number}", MODEL) for number in range(5)]
    assert targets[:3] == ["b", "b", "b"]
    assert sorted(targets[3:]) == ["a", "b"]


def test_models_without_a_group_are_omitted() -> None:
    assert Placement([view("g")]).place_runs({"a": MODEL, "b": "other"}) == {"g": ["a"]}


def test_a_model_leaves_only_a_much_busier_group() -> None:
    busy = view("own", REBALANCE_SECONDS)
    assert choose_receiver(busy, MODEL, [view("idle"), view("other", 5.0)]) == "idle"
    assert choose_receiver(busy, MODEL, [view("other", REBALANCE_SECONDS / 2)]) is None
    assert choose_receiver(busy, "unknown", [view("idle")]) is None
    assert choose_receiver(view("own", REBALANCE_SECONDS - 1), MODEL, [view("idle")]) is None


def test_samples_are_taken_from_the_busiest_group_with_a_shared_model() -> None:
    others = [view("a", 3.0), view("b", 9.0), view("c", 1.0), view("d", 99.0, model="other")]
    assert choose_victims(view("own"), others) == ["b", "a"]


# --- groups that only sample ---------------------------------------------------------------------
SAMPLER = GroupView("vllm", frozenset({MODEL}), can_train=False)
BUSY_SAMPLER = SAMPLER._replace(id="vllm-2", queued_seconds=OVERLOAD_SECONDS + 1)
TRAINER = view("trainer")


def test_groups_without_a_trainable_model_only_sample() -> None:
    models = [{"name": MODEL, "is_trainable": False}]
    (one,) = ready_views([replace(record("a", GroupState.READY), base_models=models)])
    assert not one.can_train
    (other,) = ready_views([replace(record("a", GroupState.READY), base_models=[])])
    assert other.can_train


@given(names)
def test_models_are_never_placed_on_groups_that_only_sample(run_id: str) -> None:
    assert Placement([TRAINER, SAMPLER]).place_run(run_id, MODEL) == TRAINER.id
    assert Placement([SAMPLER]).place_run(run_id, MODEL) is None
    busy = view("busy", REBALANCE_SECONDS * 10)
    assert choose_receiver(busy, MODEL, [SAMPLER]) is None


@given(names)
def test_samples_prefer_one_kind_of_group(source: str) -> None:
    placement = Placement([TRAINER, SAMPLER, BUSY_SAMPLER])
    assert placement.place_sample(source, MODEL) == TRAINER.id
    assert placement.place_sample(source, MODEL, prefers_sampler=True) == SAMPLER.id
    assert placement.has_sampler(MODEL) and not placement.has_sampler("other")


@given(names, st.booleans())
def test_samples_take_the_other_kind_if_there_is_no_group_of_their_own(
    source: str, prefers_sampler: bool
) -> None:
    for only in (TRAINER, SAMPLER):
        placement = Placement([only])
        assert placement.place_sample(source, MODEL, prefers_sampler=prefers_sampler) == only.id
    assert Placement([]).place_sample(source, MODEL, prefers_sampler=prefers_sampler) is None


def test_group_that_only_samples_takes_no_samples_of_trainers() -> None:
    busy = view("busy", OVERLOAD_SECONDS + 2)
    assert choose_victims(SAMPLER, [busy, BUSY_SAMPLER]) == [BUSY_SAMPLER.id]
    assert choose_victims(TRAINER, [busy, BUSY_SAMPLER]) == [busy.id, BUSY_SAMPLER.id]
