"""Splits training examples into micro-batches and packs them without padding.

Shape letters: T token positions of all packed examples; P pairs of (position, target).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tinkex.engine.examples import Tokens, TrainingExample

Scalar = TypeVar("Scalar", bound=np.generic)


class ExampleRef(NamedTuple):
    """The indices of a pass and of one of its examples."""

    pass_index: int
    example_index: int


def split_micro_batches(
    lengths: Sequence[Sequence[int]], max_tokens: int
) -> list[tuple[ExampleRef, ...]]:
    """Split passes into micro-batches of at most `max_tokens`; a longer example is alone.

    `lengths` has the number of tokens of every example of every pass. In a micro-batch the
    examples of a pass are adjacent, shortest first, and passes keep their order; so consecutive
    passes of an adapter stay adjacent. There are as few micro-batches as this order allows, of
    about the same size.
    """
    refs = [
        ExampleRef(pass_index, example_index)
        for pass_index, sizes in enumerate(lengths)
        for example_index in sorted(range(len(sizes)), key=sizes.__getitem__)
    ]
    sized = [(ref, lengths[ref.pass_index][ref.example_index]) for ref in refs]
    long = [(ref,) for ref, size in sized if size > max_tokens]
    short = [ref for ref, size in sized if size <= max_tokens]
    boundaries = _balanced_boundaries([size for _, size in sized if size <= max_tokens], max_tokens)
    return [tuple(short[start:stop]) for start, stop in pairwise(boundaries)] + long


def _balanced_boundaries(sizes: Sequence[int], max_tokens: int) -> list[int]:
    """Split sizes, none above the limit, into the fewest parts of about the same sum."""
    totals = [0, *accumulate(sizes)]
    earliest = _earliest_boundaries(totals, max_tokens)
    boundaries = [0]
    for num_left in range(len(earliest) - 1, 1, -1):
        start = totals[boundaries[-1]]
        balanced = _nearest_index(totals, start + (totals[-1] - start) / num_left)
        furthest = bisect_right(totals, start + max_tokens) - 1
        boundaries.append(max(earliest[-num_left], min(balanced, furthest)))
    return [*boundaries, len(sizes)] if sizes else []


def _earliest_boundaries(totals: Sequence[int], max_tokens: int) -> list[int]:
    """The boundaries of the fewest parts, each as early as the parts after it allow."""
    boundaries = [len(totals) - 1]
    while boundaries[-1] > 0:
        boundaries.append(bisect_left(totals, totals[boundaries[-1]] - max_tokens))
    return boundaries[::-1]


def _nearest_index(totals: Sequence[int], target: float) -> int:
    after = bisect_left(totals, target)
    is_before_nearer = target - totals[after - 1] <= totals[after] - target
    return after - 1 if is_before_nearer else after


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Examples concatenated without padding."""

    tokens_T: Tokens
    positions_T: Tokens
    """The position of each token in its own example."""
    lengths: list[int]
    """The number of tokens of each example."""
    rows_P: Tokens
    """The token position of each pair, counted over all examples."""
    targets_P: Tokens
    num_targets: list[int]
    """The number of pairs of each example."""

    def split_by_example(self, values_P: npt.NDArray[Scalar]) -> list[npt.NDArray[Scalar]]:
        """Split an array with one value per pair by example."""
        return np.split(values_P, np.cumsum(self.num_targets[:-1]))


def pack_examples(examples: Sequence[TrainingExample]) -> PackedBatch:
    """Concatenate examples in this order."""
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
