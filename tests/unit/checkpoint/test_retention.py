from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.checkpoint.retention import StepRetention, choose_steps_to_keep
from tinkex.errors import ConfigError

STEPS = st.sets(st.integers(0, 10_000), max_size=30)


@given(steps=STEPS, keep_last=st.integers(1, 10))
def test_newest_steps_are_kept(steps: set[int], keep_last: int) -> None:
    kept = choose_steps_to_keep(steps, StepRetention(keep_last=keep_last))
    assert kept == set(sorted(steps)[-keep_last:])


@given(steps=STEPS, keep_last=st.integers(-3, 0))
def test_zero_or_less_keeps_all(steps: set[int], keep_last: int) -> None:
    assert choose_steps_to_keep(steps, StepRetention(keep_last=keep_last)) == steps


@given(steps=STEPS, best=st.integers(0, 10_000), pinned=STEPS)
def test_only_existing_steps_are_kept(steps: set[int], best: int, pinned: set[int]) -> None:
    kept = choose_steps_to_keep(steps, StepRetention(keep_last=1), best=best, pinned=pinned)
    assert kept <= steps
    assert pinned & steps <= kept
    assert (best in kept) or (best not in steps)


def test_every_kth_step_is_kept() -> None:
    kept = choose_steps_to_keep(range(1, 13), StepRetention(keep_last=2, keep_every=5))
    assert kept == {5, 10, 11, 12}


def test_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep_every"):
        StepRetention(keep_every=-1)
