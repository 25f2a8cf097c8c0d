"""Which examples are computed together, and how they lie in memory; pure decisions on lengths.

Shape letters: T rows of all examples, one after the other; P pairs of (row, target).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tinkex.engine.examples import Tokens, TrainingExample


class ExampleRef(NamedTuple):
    """One example of one pass."""

    pass_index: int
    example_index: int


def split_micro_batches(
    lengths: Sequence[Sequence[int]], max_tokens: int
) -> list[tuple[ExampleRef, ...]]:
    """Cut passes into micro-batches of at most `max_tokens`; a longer example is alone in its own.

    `lengths` has the number of tokens of every example of every pass. In a micro-batch the
    examples of a pass lie together, the shortest first, and passes keep their order; so whoever
    lists the passes of an adapter one after the other finds that adapter's rows together. There
    are as few micro-batches as this order allows, of about the same size.
    """
    pieces = [
        ExampleRef(pass_index, example_index)
        for pass_index, row in enumerate(lengths)
        for example_index in sorted(range(len(row)), key=row.__getitem__)
    ]
    sizes = [lengths[piece.pass_index][piece.example_index] for piece in pieces]
    long = [(piece,) for piece, size in zip(pieces, sizes, strict=True) if size > max_tokens]
    rest = [piece for piece, size in zip(pieces, sizes, strict=True) if size <= max_tokens]
    borders = _balanced_boundaries([size for size in sizes if size <= max_tokens], max_tokens)
    return [tuple(rest[start:stop]) for start, stop in pairwise(borders)] + long


def _balanced_boundaries(sizes: Sequence[int], max_tokens: int) -> list[int]:
    """Where to cut a row of sizes, none above the limit, into few parts of about the same sum."""
    totals = [0, *accumulate(sizes)]
    earliest = _earliest_boundaries(totals, max_tokens)
    borders = [0]
    for num_left in range(len(earliest) - 1, 1, -1):
        start = totals[borders[-1]]
        fair = _nearest_index(totals, start + (totals[-1] - start) / num_left)
        furthest = bisect_right(totals, start + max_tokens) - 1
        borders.append(max(earliest[-num_left], min(fair, furthest)))
    return [*borders, len(sizes)] if sizes else []


def _earliest_boundaries(totals: Sequence[int], max_tokens: int) -> list[int]:
    """The borders of the fewest parts, each as early as what follows it allows."""
    borders = [len(totals) - 1]
    while borders[-1] > 0:
        borders.append(bisect_left(totals, totals[borders[-1]] - max_tokens))
    return borders[::-1]


def _nearest_index(totals: Sequence[int], target: float) -> int:
    after = bisect_left(totals, target)
    is_before_nearer = target - totals[after - 1] <= totals[after] - target
    return after - 1 if is_before_nearer else after


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Examples laid end to end, without padding."""

    tokens_T: Tokens
    positions_T: Tokens
    """Where each token stands in its own example."""
    lengths: list[int]
    """How many rows each example has."""
    rows_P: Tokens
    """The row of each pair, counted over all examples."""
    targets_P: Tokens
    num_targets: list[int]
    """How many pairs each example has."""

    def split_by_example(self, values_P: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """One number per pair, cut into those of each example."""
        return np.split(values_P, np.cumsum(self.num_targets[:-1]))


def pack_examples(examples: Sequence[TrainingExample]) -> PackedBatch:
    """Lay examples end to end, in this order."""
    lengths = [len(example.tokens) for example in examples]
    num_pairs = [len(example.targets) for example in examples]
    starts = np.cumsum([0, *lengths[:-1]])
    tokens_T = np.concatenate([example.tokens for example in examples])
    rows_P = np.concatenate([example.rows for example in examples])
    return PackedBatch(
        tokens_T=tokens_T,
        positions_T=np.arange(len(tokens_T)) - np.repeat(starts, lengths),
        lengths=lengths,
        rows_P=rows_P + np.repeat(starts, num_pairs),
        targets_P=np.concatenate([example.targets for example in examples]),
        num_targets=num_pairs,
    )
