from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tinkex.pipeline.checkpoints.resume import batches_per_update, find_mismatches

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), JSON))
def test_config_has_no_mismatch_with_itself(config: dict[str, Any]) -> None:
    assert find_mismatches(config, config) == []


def test_mismatches_show_both_values() -> None:
    saved = {"plan": {"seed": 1, "lr": 0.1}, "settings": {"width": 8}}
    current = {"plan": {"seed": 2, "lr": 0.1}, "settings": {"width": 8, "depth": 2}}
    assert find_mismatches(saved, current) == [
        "plan.seed: 1 -> 2",
        "settings.depth: absent -> 2",
    ]


def test_versions_and_world_size_may_change() -> None:
    before = {"accumulation_steps": 1, "warmup_steps": 5}
    saved = {"world_size": 2, "versions": {"torch": "1"}, "plan": before}
    # The length of the warm-up follows from the number of updates.
    now = {"accumulation_steps": 2, "warmup_steps": 9}
    assert find_mismatches(saved, {"world_size": 1, "plan": now}) == []


def test_accumulation_may_not_change_with_the_same_world_size() -> None:
    saved = {"world_size": 1, "plan": {"accumulation_steps": 1}}
    current = {"world_size": 1, "plan": {"accumulation_steps": 2}}
    assert find_mismatches(saved, current) == ["plan.accumulation_steps: 1 -> 2"]


def test_batches_per_update_counts_all_ranks() -> None:
    config = {"plan": {"accumulation_steps": 2}, "world_size": 3}
    assert batches_per_update(config) == 6
    assert batches_per_update({"plan": {}}) is None
