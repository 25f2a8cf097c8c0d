"""Recipes with regularizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.recipes.conftest import KINDS, losses, make_plan, start
from tests.integration.recipes.test_command import Trainer, trainer
from tinkex import ServiceClient
from tinkex.errors import InvalidInput
from tinkex.regularizers import L2, Entropy, KLDivergence

__all__ = ["trainer"]


@pytest.mark.parametrize("kind", KINDS)
def test_terms_of_weight_zero_do_not_change_the_losses(
    kind: str, service: ServiceClient, tmp_path: Path
) -> None:
    plain = start(make_plan(tmp_path, kind, steps=3), service, tmp_path / "plain")
    terms = (KLDivergence(weight=0.0), Entropy(weight=0.0))
    plan = make_plan(tmp_path, kind, steps=3, regularizers=terms)
    regularized = start(plan, service, tmp_path / "regularized")
    assert len(list(plain)) == len(list(regularized)) == 3
    expected = pytest.approx(losses(plain), rel=1e-4, abs=1e-6)
    assert losses(regularized) == expected
    rows: list[dict[str, Any]] = regularized.run_directory.read_metrics()
    # The reference is the initial model: no divergence before the first step, some after it.
    found = [row["regularizer/kl_reverse"] for row in rows]
    assert found[0] == pytest.approx(0.0, abs=1e-6)
    assert found[-1] > 1e-6
    assert rows[0]["regularizer/kl_reverse/grad_norm"] == 0.0


def test_weight_changes_the_training(service: ServiceClient, tmp_path: Path) -> None:
    found = []
    for weight in (0.0, 5.0):
        terms = (L2(weight=weight, reference="reference_logprobs"),)
        plan = make_plan(tmp_path, "sft", steps=6, regularizers=terms)
        reports = list(start(plan, service, tmp_path / str(weight)))
        found.append(reports[-1].metrics["regularizer/l2"])
    assert found[1] < 0.5 * found[0]


def test_settings_without_regularizers_are_unchanged(tmp_path: Path) -> None:
    assert "regularizers" not in make_plan(tmp_path, "sft").training_settings()
    plan = make_plan(tmp_path, "sft", regularizers=(L2(weight=1.0),))
    [written] = plan.training_settings()["regularizers"]  # type: ignore[misc]
    assert (written["kind"], written["weight"]) == ("l2", 1.0)
    with pytest.raises(InvalidInput, match="expected a Regularizer"):
        make_plan(tmp_path, "sft", regularizers=("l2",))


def test_command_reads_a_file(
    trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "terms.toml"
    path.write_text('[[regularizer]]\nkind = "l2"\nweight = 0.1\n')
    result = trainer.train("sft", "--regularizers", str(path), "--steps", "2")
    assert result.exit_code == 0
    assert "regularizer/l2" in (tmp_path / "run" / "metrics.jsonl").read_text()
    path.write_text('[[regularizer]]\nkind = "l9"\nweight = 0.1\n')
    result = trainer.train("sft", "--regularizers", str(path))
    assert result.exit_code != 0
    assert "'l9'" in capsys.readouterr().err
