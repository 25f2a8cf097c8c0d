"""Cookbook outcomes: what counts as a pass, and what the page says about the rest."""

from __future__ import annotations

import pytest

from tests.compat.cookbook.page import cookbook_section
from tests.compat.cookbook.recipes import RECIPES, falls, is_earned, is_high
from tests.compat.cookbook.runner import LIMITS, UTILITIES
from tests.compat.page import by_name
from tests.compat.results import DEFECT, FAIL, PASS, Outcome


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], False), ([0.9, 0.1], False), ([0.1, 0.5], True), ([0.0, 0.4, 0.6], True)],
)
def test_a_reward_is_high_if_its_second_half_is(values: list[float], expected: bool) -> None:
    assert is_high(values) is expected
    assert is_earned([each / 5 for each in values]) is expected


@pytest.mark.parametrize(("values", "expected"), [([1.0], False), ([1, 2], False), ([2, 1], True)])
def test_a_loss_falls_from_the_first_step_to_the_last(values: list[float], expected: bool) -> None:
    assert falls(values) is expected


def test_cells_and_limits_of_the_section() -> None:
    tied = next(name for name, kind in UTILITIES.items() if kind == "merge_tied")
    reason = LIMITS["merge_tied"][1]
    found = by_name([Outcome("sl_loop", FAIL, "why"), Outcome(tied, DEFECT, reason)])
    passed = by_name([Outcome(name, PASS) for name in (*(each.name for each in RECIPES), tied)])
    lines = "\n".join(cookbook_section({"official": found, "own": passed})).splitlines()
    [loop] = [line for line in lines if line.startswith("| `sl_loop` |")]
    assert loop.endswith("| **no** | yes |")
    [merge] = [line for line in lines if line.startswith(f"| {tied} |")]
    assert merge.endswith("| cookbook | yes |")
    assert f"- {tied}: {reason}" in lines
