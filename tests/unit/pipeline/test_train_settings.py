from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from tinkex.errors import ConfigError
from tinkex.pipeline.settings_sources import make_settings
from tinkex.pipeline.train_settings import TrainSettings


def settings(**values: object) -> TrainSettings:
    return make_settings("pretrain", {"out_dir": "out", "data_path": "data.jsonl", **values})


def factors(
    given: TrainSettings, total_steps: int, steps: range, warmup_steps: int = 0
) -> list[float]:
    return [given.lr_factor(step, total_steps, warmup_steps) for step in steps]


def test_lr_factor_warms_up_to_the_peak() -> None:
    given = settings()
    assert factors(given, 20, range(5), 4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_decays_to_the_final_learning_rate() -> None:
    given = settings(learning_rate=0.5)
    assert factors(given, 10, range(1)) == [1.0]
    assert factors(given, 10, range(5, 6)) == [pytest.approx(0.55)]
    assert factors(given, 10, range(10, 100, 89)) == [pytest.approx(0.1), pytest.approx(0.1)]


@for_all(
    step=st.integers(0, 300),
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    final=st.floats(0.0, 1.0),
)
def test_lr_factor_is_between_zero_and_one(
    step: int, warmup: int, total: int, final: float
) -> None:
    given = settings(learning_rate=1.0, min_learning_rate=final)
    assert 0.0 <= given.lr_factor(step, total, warmup) <= 1.0 + 1e-12


def test_constant_schedule_stays_at_the_peak() -> None:
    given = settings(schedule="constant")
    assert given.lr_factor(100, 3, 0) == 1.0


def test_save_and_evaluation_intervals() -> None:
    given = settings(save_interval=3, eval_interval=4)
    assert [step for step in range(1, 10) if given.is_save_due(step)] == [3, 6, 9]
    assert [step for step in range(10) if given.is_evaluation_due(step)] == [0, 4, 8]
    seldom = settings(save_interval=0, eval_interval=0)
    assert not any(seldom.is_save_due(step) for step in range(1, 10))
    assert [step for step in range(10) if seldom.is_evaluation_due(step)] == [0]


def test_defaults_derived_from_other_fields() -> None:
    given = settings(learning_rate=0.5)
    assert given.checkpoint_root == Path("out/checkpoints")
    assert settings(ckpt_dir=Path("c")).checkpoint_root == Path("c")
    assert given.final_learning_rate == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("values", "num_batches", "world_size", "warmup"),
    [
        ({"warmup_steps": 7}, 1000, 1, 7),
        ({"warmup_steps": 0}, 1000, 1, 0),
        ({"accumulation_steps": 1}, 1000, 1, 50),
        ({"accumulation_steps": 1}, 1000, 2, 25),
        ({"accumulation_steps": 1, "epochs": 1000}, 1000, 1, 200),
        ({"accumulation_steps": 1, "max_steps": 60}, 1000, 1, 3),
    ],
)
def test_warmup_is_a_twentieth_of_all_updates(
    values: dict[str, object], num_batches: int, world_size: int, warmup: int
) -> None:
    assert settings(**values).resolve_warmup(num_batches, world_size) == warmup


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
        settings(**wrong)
