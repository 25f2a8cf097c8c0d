"""Shards: every example once, balanced, and one tree of additions for any number of ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.gradient_shards import TreeSum, plan_batches, shards_of_rank, split_shards
from tinkex.engine.micro_batches import ExampleRef, split_micro_batches

LENGTHS = st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=30), min_size=1, max_size=4)
SHARDS = st.sampled_from([1, 2, 4, 8, 16])


@given(LENGTHS, SHARDS)
def test_every_example_is_in_one_shard(lengths: list[list[int]], num_shards: int) -> None:
    shards = split_shards(lengths, num_shards)
    assert len(shards) == num_shards
    expected = Counter(
        ExampleRef(p, e) for p, sizes in enumerate(lengths) for e in range(len(sizes))
    )
    assert Counter(ref for refs in shards for ref in refs) == expected
    assert all(refs == sorted(refs) for refs in shards)


@given(LENGTHS, SHARDS)
def test_shards_differ_by_at_most_the_longest_example(
    lengths: list[list[int]], num_shards: int
) -> None:
    loads = [sum(lengths[p][e] for p, e in refs) for refs in split_shards(lengths, num_shards)]
    assert max(loads) - min(loads) <= max(map(max, lengths))


@given(st.integers(1, 8), st.sampled_from([2, 4, 8]))
def test_few_examples_are_spread_over_the_ranks(num_examples: int, num_ranks: int) -> None:
    shards = split_shards([[10] * num_examples], 8)
    busy = [
        any(shards[shard] for shard in shards_of_rank(rank, num_ranks, 8))
        for rank in range(num_ranks)
    ]
    assert sum(busy) == min(num_examples, num_ranks)


@given(LENGTHS, st.integers(1, 300))
def test_one_shard_has_the_micro_batches_of_a_plain_split(
    lengths: list[list[int]], max_tokens: int
) -> None:
    batches = plan_batches(lengths, 1, max_tokens)
    assert [batch.refs for batch in batches] == split_micro_batches(lengths, max_tokens)


@given(LENGTHS, SHARDS, st.integers(1, 300))
def test_batches_are_ordered_by_shard_and_within_the_limit(
    lengths: list[list[int]], num_shards: int, max_tokens: int
) -> None:
    batches = plan_batches(lengths, num_shards, max_tokens)
    assert [batch.shard for batch in batches] == sorted(batch.shard for batch in batches)
    assert sum(len(batch.refs) for batch in batches) == sum(map(len, lengths))
    for batch in batches:
        assert batch.num_tokens == sum(lengths[p][e] for p, e in batch.refs)
        assert batch.num_tokens <= max_tokens or len(batch.refs) == 1


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16])
def test_ranks_divide_all_shards(num_ranks: int, num_shards: int) -> None:
    divided = [shards_of_rank(rank, num_ranks, num_shards) for rank in range(num_ranks)]
    assert [shard for shards in divided for shard in shards] == list(range(num_shards))


def tree(leaves: list[str | None]) -> str | None:
    total: TreeSum[str] = TreeSum(lambda left, right: f"({left}+{right})")
    for leaf in leaves:
        total.append(leaf)
    return total.total


@given(st.lists(st.booleans(), min_size=8, max_size=8))
def test_the_tree_is_the_same_for_any_number_of_ranks(is_empty: list[bool]) -> None:
    leaves = [None if empty else str(shard) for shard, empty in enumerate(is_empty)]
    totals = {
        tree([tree([leaves[s] for s in shards_of_rank(r, ranks, 8)]) for r in range(ranks)])
        for ranks in (1, 2, 4, 8)
    }
    assert len(totals) == 1
    assert all(is_empty) == (totals == {None})


def test_the_tree_adds_neighbours() -> None:
    assert tree(["0", "1", "2", "3"]) == "((0+1)+(2+3))"
    assert tree(["0", None, None, "3"]) == "(0+3)"
    assert tree([]) is None
    with pytest.raises(AssertionError):
        tree(["0", "1", "2"])
