"""Settings of regularizers and their TOML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinkex.errors import InvalidInput
from tinkex.regularizers import (
    L2,
    Consistency,
    ElasticNet,
    Entropy,
    GradientPenalty,
    KLDivergence,
    load_regularizers,
    parse_regularizers,
    regularizer_to_dict,
)
from tinkex.regularizers.combined import MAX_REGULARIZERS, check_regularizers
from tinkex.regularizers.regularizer_files import KINDS, MAX_FILE_BYTES


def test_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "terms.toml"
    path.write_text(
        '[[regularizer]]\nkind = "kl"\nweight = 0.1\ndirection = "forward"\n'
        '[[regularizer]]\nkind = "l2"\nweight = 2\nname = "size"\n'
    )
    assert load_regularizers(path) == (
        KLDivergence(weight=0.1, direction="forward"),
        L2(weight=2, name="size"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_plain_values_round_trip(kind: str) -> None:
    [parsed] = parse_regularizers([{"kind": kind, "weight": 0.5}])
    assert parse_regularizers([regularizer_to_dict(parsed)]) == (parsed,)
    assert type(parsed) is KINDS[kind]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a = 1", "must contain only"),
        ("[[regularizer]", "is not valid TOML"),
        ("#" * (MAX_FILE_BYTES + 1), "more than 65536 bytes"),
        ('[[regularizer]]\nkind = "l3"\nweight = 1', "is 'l3'; expected one of consistency"),
        ('[[regularizer]]\nkind = "l1"\nwait = 1', "has no setting 'wait'"),
        ('[[regularizer]]\nkind = "l1"', "'l1' has no weight"),
        ('[[regularizer]]\nkind = "l1"\nweight = "a"', "invalid setting"),
    ],
)
def test_invalid_file_is_rejected(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "terms.toml"
    path.write_text(content)
    with pytest.raises(InvalidInput, match=message):
        load_regularizers(path)


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_regularizers(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (L2, {"weight": -1.0}, "weight is -1.0; expected at least 0"),
        (L2, {"weight": 1.0, "name": "a b"}, "'a b'"),
        (L2, {"weight": 1.0, "reduction": "max"}, "reduction is 'max'"),
        (ElasticNet, {"weight": 1.0, "l1_ratio": 2.0}, "l1_ratio is 2.0"),
        (Entropy, {"weight": 1.0, "goal": "up"}, "goal is 'up'"),
        (KLDivergence, {"weight": 1.0, "direction": "back"}, "direction is 'back'"),
        (KLDivergence, {"weight": 1.0, "estimator": "k2"}, "estimator is 'k2'"),
        (Consistency, {"weight": 1.0, "distance": "l3"}, "distance is 'l3'"),
        (GradientPenalty, {"weight": 1.0, "target_norm": -1.0}, "target_norm is -1.0"),
    ],
)
def test_invalid_setting_is_rejected(cls: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        cls(**settings)


def test_names_differ_and_number_is_limited() -> None:
    check_regularizers([L2(weight=1), L2(weight=1, name="other")])
    with pytest.raises(InvalidInput, match="two regularizers are named 'l2'"):
        check_regularizers([L2(weight=1), L2(weight=1)])
    with pytest.raises(InvalidInput, match="at most 32"):
        check_regularizers([L2(weight=1, name=f"n{n}") for n in range(MAX_REGULARIZERS + 1)])
    with pytest.raises(InvalidInput, match="expected a Regularizer"):
        check_regularizers(["l2"])
