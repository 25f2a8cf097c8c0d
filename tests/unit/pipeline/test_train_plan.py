from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ConfigError
from tinkex.pipeline.stage_interface import (
    DataPosition,
    TrainPlan,
    TrainResult,
    count_updates,
    next_window,
)


def factors(plan: TrainPlan, total_steps: int, steps: range) -> list[float]:
    return [plan.lr_factor(step, total_steps) for step in steps]


def test_lr_factor_warms_up_to_the_peak() -> None:
    plan = TrainPlan(out_dir=Path("out"), warmup_steps=4)
    assert factors(plan, 20, range(5)) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_decays_to_the_final_learning_rate() -> None:
    plan = TrainPlan(out_dir=Path("out"), learning_rate=0.5)
    assert factors(plan, 10, range(1)) == [1.0]
    assert factors(plan, 10, range(5, 6)) == [pytest.approx(0.55)]
    assert factors(plan, 10, range(10, 100, 89)) == [pytest.approx(0.1), pytest.approx(0.1)]


@given(
    step=st.integers(0, 300),
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    final=st.floats(0.0, 1.0),
)
def test_lr_factor_is_between_zero_and_one(
    step: int, warmup: int, total: int, final: float
) -> None:
    plan = TrainPlan(
        out_dir=Path("out"), learning_rate=1.0, min_learning_rate=final, warmup_steps=warmup
    )
    assert 0.0 <= plan.lr_factor(step, total) <= 1.0 + 1e-12


def test_constant_schedule_stays_at_the_peak() -> None:
    plan = TrainPlan(out_dir=Path("out"), schedule="constant")
    assert plan.lr_factor(100, 3) == 1.0


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_windows_cover_every_batch_once_when_their_width_changes(
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
def test_count_updates_counts_the_remaining_windows(
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


def test_save_and_evaluation_intervals() -> None:
    plan = TrainPlan(out_dir=Path("out"), save_interval=3, eval_interval=4)
    assert [step for step in range(1, 10) if plan.is_save_due(step)] == [3, 6, 9]
    assert [step for step in range(10) if plan.is_evaluation_due(step)] == [0, 4, 8]
    seldom = TrainPlan(out_dir=Path("out"), save_interval=0, eval_interval=0)
    assert not any(seldom.is_save_due(step) for step in range(1, 10))
    assert [step for step in range(10) if seldom.is_evaluation_due(step)] == [0]


def test_defaults_derived_from_other_fields() -> None:
    plan = TrainPlan(out_dir=Path("out"), learning_rate=0.5)
    assert plan.checkpoint_root == Path("out/checkpoints")
    assert TrainPlan(out_dir=Path("out"), ckpt_dir=Path("c")).checkpoint_root == Path("c")
    assert plan.final_learning_rate == pytest.approx(0.05)


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
def test_invalid_values_are_rejected_with_the_field_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainPlan(out_dir=Path("out"), **wrong)  # type: ignore[arg-type]


def test_exit_code_reflects_the_stop_signal() -> None:
    def stopped(stopped_by: int | None) -> TrainResult:
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

    assert [stopped(number).exit_code for number in (None, 2, 15)] == [0, 130, 143]
