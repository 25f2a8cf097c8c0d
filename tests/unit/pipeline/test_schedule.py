from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ConfigError
from tinkex.pipeline.schedule import (
    DataPosition,
    Schedule,
    count_updates,
    is_evaluation_due,
    is_save_due,
    make_schedule,
    next_window,
)
from tinkex.pipeline.stage_interface import TrainPlan, TrainResult


def test_warm_up_rises_by_updates_and_reaches_the_peak() -> None:
    schedule = Schedule(warmup_steps=4, total_steps=20)
    assert [schedule.factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_falls_from_the_peak_to_its_final_share() -> None:
    schedule = Schedule(total_steps=10, final_factor=0.1)
    assert schedule.factor(0) == 1.0
    assert schedule.factor(5) == pytest.approx(0.55)
    assert schedule.factor(10) == pytest.approx(0.1)
    assert schedule.factor(99) == pytest.approx(0.1)


@given(
    step=st.integers(0, 300),
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    final=st.floats(0.0, 1.0),
)
def test_no_share_is_above_the_peak_or_below_nothing(
    step: int, warmup: int, total: int, final: float
) -> None:
    schedule = Schedule(warmup_steps=warmup, total_steps=total, final_factor=final)
    assert 0.0 <= schedule.factor(step) <= 1.0 + 1e-12


def test_constant_stays() -> None:
    assert Schedule(name="constant", total_steps=3).factor(100) == 1.0


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_windows_take_every_batch_once_even_when_their_width_changes(
    sizes: list[int], widths: list[int]
) -> None:
    position, taken, number = DataPosition(), [], 0
    while position.epoch < len(sizes):
        width = widths[number % len(widths)]
        window = next_window(position, sizes[position.epoch], width)
        taken += [(window.epoch, index) for index in window.indexes]
        position, number = window.after, number + 1
    assert taken == [(epoch, index) for epoch, size in enumerate(sizes) for index in range(size)]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    width=st.integers(1, 9),
    done=st.integers(0, 20),
)
def test_the_updates_that_are_left_are_those_that_follow(
    sizes: list[int], width: int, done: int
) -> None:
    position, total = (
        DataPosition(),
        count_updates(DataPosition(), len(sizes), sizes.__getitem__, width),
    )
    for _ in range(min(done, total)):
        position = next_window(position, sizes[position.epoch], width).after
    left = count_updates(position, len(sizes), sizes.__getitem__, width)
    assert left == total - min(done, total)


def test_a_plan_says_when_to_save_and_to_evaluate() -> None:
    plan = TrainPlan(out_dir=Path("out"), save_interval=3, eval_interval=4)
    assert [step for step in range(1, 10) if is_save_due(plan, step)] == [3, 6, 9]
    assert [step for step in range(10) if is_evaluation_due(plan, step)] == [0, 4, 8]
    seldom = TrainPlan(out_dir=Path("out"), save_interval=0, eval_interval=0)
    assert not any(is_save_due(seldom, step) for step in range(1, 10))
    assert [step for step in range(10) if is_evaluation_due(seldom, step)] == [0]


def test_a_plan_has_its_defaults_from_other_values() -> None:
    plan = TrainPlan(out_dir=Path("out"), learning_rate=0.5)
    assert plan.checkpoint_root == Path("out/checkpoints")
    assert plan.final_learning_rate == pytest.approx(0.05)
    assert make_schedule(plan, 10).final_factor == pytest.approx(0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"max_steps": -1},
        {"learning_rate": -1.0},
        {"schedule": "linear"},
        {"optimizer": "sgd"},
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainPlan(out_dir=Path("out"), **wrong)  # type: ignore[arg-type]


def test_the_exit_code_tells_of_the_signal() -> None:
    def ended(stopped_by: int | None) -> TrainResult:
        return TrainResult(
            stage="sft",
            steps=1,
            tokens=1,
            samples=1,
            seconds=1.0,
            before={},
            after={},
            stopped_by=stopped_by,
        )

    assert [ended(number).exit_code for number in (None, 2, 15)] == [0, 130, 143]
