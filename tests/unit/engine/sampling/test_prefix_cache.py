"""The prefix index finds the longest common prefix, by key."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.sampling import prefix_cache
from tinkex.engine.sampling.prefix_cache import (
    MIN_PREFIX_TOKENS,
    PrefixIndex,
    PrefixMatch,
    common_prefix_length,
)
from tinkex.engine.sampling.request import Tokens


def _tokens(*values: int) -> Tokens:
    return np.array(values, dtype=np.int64)


_START = _tokens(*range(MIN_PREFIX_TOKENS))


def _after_start(*values: int) -> Tokens:
    return np.concatenate([_START, _tokens(*values)])


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_length(one: list[int], two: list[int]) -> None:
    num = common_prefix_length(_tokens(*one), _tokens(*two))
    assert one[:num] == two[:num]
    assert num == min(len(one), len(two)) or one[num] != two[num]


def test_find_longest_common_prefix() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add("a", _after_start(1, 2, 3), "near")
    index.add("a", _after_start(1, 9), "far")
    assert index.find("a", _after_start(1, 2, 7)) == PrefixMatch("near", MIN_PREFIX_TOKENS + 2)
    assert index.find("a", _after_start(1, 9, 9)) == PrefixMatch("far", MIN_PREFIX_TOKENS + 2)


def test_prompts_of_other_adapters_do_not_match() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add("a", _after_start(1), "a's")
    assert index.find("b", _after_start(1)) is None
    assert index.find(None, _after_start(1)) is None


def test_short_common_prefix_is_ignored() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    assert index.add("a", _START[:-1], "short") == ["short"]
    index.add("a", _after_start(1), "long")
    assert index.find("a", np.concatenate([_START[:-1], _tokens(77, 78)])) is None


def test_longer_prompt_replaces_its_prefix() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add("a", _after_start(1), "first turn")
    assert index.add("a", _after_start(1, 2, 3), "second turn") == ["first turn"]
    assert index.find("a", _after_start(1)) == PrefixMatch("second turn", MIN_PREFIX_TOKENS + 1)


def test_eviction_is_lru_among_free_prompts() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    for name in ("one", "two", "three"):
        index.add(name, _after_start(1), name)
    index.find("one", _after_start(1))
    assert index.evict_oldest(lambda name: name != "two") == "three"
    assert index.evict_oldest(lambda name: True) == "two"
    assert index.evict_oldest(lambda name: False) is None
    assert list(index) == ["one"]


def test_number_of_prompts_is_limited() -> None:
    index: PrefixIndex[int] = PrefixIndex()
    removed = [out for number in range(100) for out in index.add("a", _after_start(number), number)]
    assert removed == list(range(100 - prefix_cache._MAX_PER_BUCKET))
    for number in range(2 * prefix_cache._MAX_PROMPTS):
        index.add(number, _after_start(1), number)
    assert len(index) == prefix_cache._MAX_PROMPTS
