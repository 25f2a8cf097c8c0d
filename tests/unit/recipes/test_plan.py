from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinkex.errors import InvalidInput
from tinkex.recipes.plan import DpoPlan, Plan, RlPlan, SftPlan, describe_changes, settings_digest

DATA = Path("some/My data.jsonl")


def plan(**settings: Any) -> SftPlan:
    return SftPlan(**{"data": DATA, "base_model": "m", **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_model": None}, "base_model or start_from is required"),
        ({"start_from": "weights"}, "Invalid tinker path"),
        ({"name": "a b"}, "Invalid checkpoint name"),
        ({"schedule": "step"}, "schedule is 'step'; expected one of constant, linear, cosine"),
        ({"rank": 0}, "rank is 0; expected at least 1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; expected more than 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"warmup": -1.0}, "warmup is -1.0"),
        ({"save_every": -1}, "save_every is -1"),
        ({"max_tokens": 1}, "max_tokens is 1"),
    ],
)
def test_setting_out_of_range_is_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan(**settings)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (DpoPlan, {"beta": 0.0}, "beta is 0.0"),
        (DpoPlan, {"rank": 0}, "rank is 0"),
        (RlPlan, {"reward": "r.py:f", "loss": "x"}, "loss is 'x'; expected one of importance"),
        (RlPlan, {"reward": "r.py:f", "group_size": 1}, "group_size is 1"),
        (RlPlan, {"reward": "r.py:f", "temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_recipe_specific_settings_are_checked(
    kind: type[Plan], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        kind(data=DATA, base_model="m", **settings)


def test_label_is_a_safe_name() -> None:
    assert plan().label == "sft-My-data"
    assert plan(name="mine").label == "mine"
    assert plan(data=Path("ä.jsonl")).label == "sft"


def test_training_settings_exclude_incidental_ones() -> None:
    first = plan().training_settings()
    assert plan(save_every=7, samples=("hi",), eval_every=3).training_settings() == first
    assert plan(data=Path("moved.jsonl"), name=None).training_settings() == first
    assert settings_digest(plan(seed=1).training_settings()) != settings_digest(first)
    assert plan(seed=1).training_settings() != first
    assert DpoPlan(data=DATA, base_model="m").training_settings() != first


def test_settings_are_plain_json() -> None:
    written = plan(samples=("a",), eval_data=Path("e.jsonl")).to_dict()
    assert written["data"] == str(DATA)
    assert written["samples"] == ["a"]
    assert written["recipe"] == "sft"


def test_describe_changes() -> None:
    assert describe_changes({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == [
        "b was 2 and is 3",
        "c was None and is 4",
    ]
