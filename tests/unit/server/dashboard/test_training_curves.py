from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.dashboard.queries import LRUCache
from tinkex.server.http.run_history import (
    NUM_SPEED_PASSES,
    RunHistory,
    drop_before,
    extend_history,
    tokens_per_second,
)
from tinkex.store.records import StepRecord

KINDS = (
    "create_model",
    "forward",
    "forward_backward",
    "optim_step",
    "load_weights",
    "save_weights",
)


def step(kind: str, at: float = 0.0, **fields: Any) -> StepRecord:
    values: dict[str, Any] = {
        "session_id": "s",
        "run_id": "r",
        "sampler_id": None,
        "kind": kind,
        "job_id": "j",
        "num_tokens": 0,
        "metrics": None,
        "queued_at": at,
        "started_at": at,
        "finished_at": at + 1,
    }
    return StepRecord(**values | fields)


def a_pass(at: float, loss: float | None, num_tokens: int = 10) -> StepRecord:
    metrics = {} if loss is None else {"loss:sum": loss}
    return step("forward_backward", at, num_tokens=num_tokens, metrics=metrics)


def history_of(*steps: StepRecord) -> RunHistory:
    return extend_history(RunHistory(), list(enumerate(steps, 1)))


def test_loss_is_divided_by_token_weights() -> None:
    weighed = [
        step(
            "forward_backward",
            at,
            num_tokens=100,
            metrics={"loss:sum": loss, "weight:sum": weight},
        )
        for at, loss, weight in ((1, 2.0, 0.5), (2, 4.0, 0.25))
    ]
    [update] = history_of(*weighed, step("optim_step", 5)).updates
    assert update.loss == pytest.approx(6.0 / 0.75)
    unweighed = step("forward_backward", 1, num_tokens=9, metrics={"loss:sum": 2.0})
    nothing = step("forward_backward", 1, metrics={"loss:sum": 2.0, "weight:sum": 0.0})
    assert history_of(unweighed, step("optim_step", 5)).updates[0].loss == pytest.approx(2.0 / 9)
    assert history_of(nothing, step("optim_step", 5)).updates[0].loss is None


def test_update_loss_is_mean_per_token() -> None:
    history = history_of(
        step("create_model"),
        a_pass(1, 30.0, 10),
        a_pass(2, 10.0, 30),
        step("optim_step", 5),
        a_pass(7, 5.0, 10),
        step("optim_step", 8),
    )

    first, second = history.updates
    assert (first.loss, first.num_tokens, first.num_passes) == (1.0, 40, 2)
    assert (first.seconds, first.finished_at) == (5.0, 6.0)
    assert second.loss == 0.5
    assert history.num_tokens == 50
    assert history.is_whole


def test_passes_without_optim_step_are_open_update() -> None:
    history = history_of(step("create_model"), a_pass(1, 20.0))

    assert history.updates == ()
    assert history.open_update is not None
    assert history.open_update.loss == 2.0


def test_load_discards_passes_and_forward_is_ignored() -> None:
    history = history_of(
        a_pass(1, 99.0),
        step("load_weights", 2),
        step("forward", 3, num_tokens=10, metrics={"loss:sum": 77.0}),
        a_pass(4, 10.0),
        step("save_weights", 5),
        step("optim_step", 6),
    )

    assert [update.loss for update in history.updates] == [1.0]
    assert history.open_update is None


@pytest.mark.parametrize(
    "lone", [a_pass(1, None), a_pass(1, 3.0, num_tokens=0), step("optim_step")]
)
def test_update_without_loss_has_none(lone: StepRecord) -> None:
    history = history_of(lone, step("optim_step", 2))

    assert history.updates[-1].loss is None


@given(st.lists(st.sampled_from(KINDS), max_size=40), st.integers(0, 40))
def test_extended_history_equals_full_history(kinds: list[str], cut: int) -> None:
    steps = [
        (number, step(kind, number, num_tokens=3, metrics={"loss:sum": float(number)}))
        for number, kind in enumerate(kinds, 1)
    ]

    at_once = extend_history(RunHistory(), steps)
    in_two = extend_history(extend_history(RunHistory(), steps[:cut]), steps[cut:])

    assert at_once == in_two


def test_history_is_unchanged_without_new_steps() -> None:
    history = history_of(a_pass(1, 1.0), step("optim_step", 2))

    assert extend_history(history, []) is history
    assert drop_before(history, 1) is history


def test_deleted_steps_are_dropped_from_history() -> None:
    steps = [
        step("create_model"),
        a_pass(1, 1.0),
        step("optim_step"),
        a_pass(2, 2.0),
        step("optim_step"),
    ]
    history = history_of(*steps)

    trimmed = drop_before(history, 4)

    assert [update.no for update in trimmed.updates] == [5]
    assert not trimmed.is_whole
    assert not extend_history(RunHistory(), [(4, steps[3]), (5, steps[4])]).is_whole


def test_speed_of_latest_passes() -> None:
    slow = [a_pass(at, 1.0, 1) for at in range(50)]
    fast = [a_pass(100 + at, 1.0, 1000) for at in range(NUM_SPEED_PASSES)]

    history = history_of(*slow, *fast)

    assert tokens_per_second(history.recent) == 1000.0
    assert tokens_per_second([]) is None
    assert tokens_per_second([step("forward_backward", 1, finished_at=1.0)]) is None


def test_least_recently_used_entry_is_evicted() -> None:
    cache: LRUCache[str, int] = LRUCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.get("a")
    cache.put("c", 3)

    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    assert len(cache) == 2


def test_non_finite_loss_is_a_gap() -> None:
    history = history_of(a_pass(1, float("nan")), step("optim_step", 2))

    assert [update.loss for update in history.updates] == [None]
