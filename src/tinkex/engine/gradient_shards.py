"""Splits passes into virtual shards, and adds up the shards' gradients in a fixed binary tree.

A shard is computed on its own, and the tree depends only on the number of shards. So the sum has
the same bits on any number of ranks that divides it: each rank adds up one subtree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from tinkex.engine.micro_batches import ExampleRef, split_micro_batches

ValueT = TypeVar("ValueT")


class ShardBatch(NamedTuple):
    """A micro-batch of one shard."""

    shard: int
    refs: tuple[ExampleRef, ...]
    num_tokens: int


def split_shards(lengths: Sequence[Sequence[int]], num_shards: int) -> list[list[ExampleRef]]:
    """Divide the examples of passes among shards of about the same number of tokens.

    `lengths` has the number of tokens of every example of every pass. The examples of a pass,
    longest first, go to the shard with the fewest tokens; among equal ones the order spreads few
    examples over many ranks. Each shard has its examples in their original order.
    """
    if num_shards == 1:
        return [[ExampleRef(p, e) for p, sizes in enumerate(lengths) for e in range(len(sizes))]]
    loads = [(0, _reverse_bits(shard, num_shards), shard) for shard in range(num_shards)]
    heapq.heapify(loads)
    shards: list[list[ExampleRef]] = [[] for _ in range(num_shards)]
    for pass_index, sizes in enumerate(lengths):
        for example_index in sorted(range(len(sizes)), key=lambda e: -sizes[e]):
            load, order, shard = loads[0]
            heapq.heapreplace(loads, (load + sizes[example_index], order, shard))
            shards[shard].append(ExampleRef(pass_index, example_index))
    return [sorted(refs) for refs in shards]


def _reverse_bits(number: int, limit: int) -> int:
    """The bits of a number below a power of two in reverse order: 0, 4, 2, 6, 1, 5, 3, 7 for 8."""
    result = 0
    while limit > 1:
        result, number, limit = result * 2 + number % 2, number // 2, limit // 2
    return result


def plan_batches(
    lengths: Sequence[Sequence[int]], num_shards: int, max_tokens: int
) -> list[ShardBatch]:
    """Split passes into the micro-batches of all shards, in the order of the shards."""
    batches = []
    for shard, refs in enumerate(split_shards(lengths, num_shards)):
        own: list[list[int]] = [[] for _ in lengths]
        for ref in refs:
            own[ref.pass_index].append(ref.example_index)
        sizes = [[lengths[p][e] for e in indices] for p, indices in enumerate(own)]
        for batch in split_micro_batches(sizes, max_tokens):
            original = tuple(ExampleRef(p, own[p][e]) for p, e in batch)
            batches.append(ShardBatch(shard, original, sum(lengths[p][e] for p, e in original)))
    return batches


def shards_of_rank(rank: int, num_ranks: int, num_shards: int) -> range:
    """The consecutive shards that a rank computes; empty for some ranks if there are too few."""
    if num_shards < num_ranks:
        return range(rank, min(rank + 1, num_shards))
    per_rank = num_shards // num_ranks
    return range(rank * per_rank, (rank + 1) * per_rank)


class TreeSum(Generic[ValueT]):
    """Adds values pairwise in a binary tree while they arrive in order; None counts as nothing.

    At most one value per level of the tree is kept.
    """

    def __init__(self, add: Callable[[ValueT, ValueT], ValueT]) -> None:
        self._add = add
        self._partial: list[tuple[int, ValueT | None]] = []
        """The level and value of each complete subtree."""

    def append(self, value: ValueT | None) -> None:
        """Add the next leaf."""
        level = 0
        while self._partial and self._partial[-1][0] == level:
            value = self.combine(self._partial.pop()[1], value)
            level += 1
        self._partial.append((level, value))

    def combine(self, left: ValueT | None, right: ValueT | None) -> ValueT | None:
        """The sum of two subtrees."""
        if left is None or right is None:
            return left if right is None else right
        return self._add(left, right)

    @property
    def total(self) -> ValueT | None:
        """The sum; the number of leaves must be a power of two, or 0."""
        assert len(self._partial) <= 1, "the tree is not complete"
        return self._partial[0][1] if self._partial else None
