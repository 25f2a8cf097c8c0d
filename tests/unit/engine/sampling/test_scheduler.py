"""Who goes next: first come, first served, and prompts never hold samples up for long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.sampling.scheduler import (
    FILL_TOKENS,
    FILL_TOKENS_BESIDE,
    MIN_COHORT,
    MIN_SHARED_TOKENS,
    is_shared,
    max_kept_tokens,
    num_to_begin,
    share_tokens,
)


@given(st.lists(st.integers(1, 2000)), st.booleans(), st.integers(1, 5000))
def test_a_pass_reads_no_more_than_it_may_and_serves_the_first_first(
    wanted: list[int], has_samples: bool, pass_tokens: int
) -> None:
    shares = share_tokens(wanted, has_samples=has_samples, pass_tokens=pass_tokens)
    limit = min(pass_tokens, FILL_TOKENS_BESIDE if has_samples else FILL_TOKENS)
    assert sum(shares) == min(sum(wanted), limit)
    for index, (share, num) in enumerate(zip(shares, wanted, strict=True)):
        assert share == num or not any(shares[index + 1 :])


def test_running_samples_are_held_up_for_less() -> None:
    assert share_tokens([10_000], has_samples=True, pass_tokens=4096) == [FILL_TOKENS_BESIDE]
    assert share_tokens([10_000], has_samples=False, pass_tokens=4096) == [FILL_TOKENS]


def test_samples_share_a_long_prompt() -> None:
    assert is_shared(MIN_COHORT, MIN_SHARED_TOKENS)
    assert not is_shared(MIN_COHORT - 1, MIN_SHARED_TOKENS)
    assert not is_shared(MIN_COHORT, MIN_SHARED_TOKENS - 1)


def test_samples_begin_as_there_are_places() -> None:
    assert num_to_begin(1, 5, 10, 64) == 1
    assert num_to_begin(9, 5, 10, 64) == 5
    assert num_to_begin(9, 0, 10, 64) == 0


def test_samples_that_can_share_wait_for_places_beside_each_other() -> None:
    assert num_to_begin(9, MIN_COHORT - 1, 1000, 64) == 0
    assert num_to_begin(9, MIN_COHORT, 1000, 64) == MIN_COHORT
    assert num_to_begin(9, 2, 1000, 2) == 2, "there will never be more places"


def test_one_token_needs_no_place_to_go_on() -> None:
    assert max_kept_tokens(100, 128, 1) == 100
    assert max_kept_tokens(100, 128, 2) == 228
