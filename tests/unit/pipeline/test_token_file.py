"""Packing, splitting, shuffling and the eval split."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkex.pipeline.token_file import (
    pack_sequences,
    shuffled_order,
    split_documents,
    split_held_out,
    truncate_documents,
)

CAPACITY = 16
ALL = np.ones(100, dtype=np.bool_)
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=60)


@given(LENGTHS, st.integers(0, 5))
def test_packing_uses_every_piece_once_within_capacity(lengths: list[int], seed: int) -> None:
    sequences = pack_sequences(lengths, CAPACITY, seed)
    assert sorted(piece for found in sequences for piece in found.tolist()) == list(
        range(len(lengths))
    )
    assert all(sum(lengths[piece] for piece in found) <= CAPACITY for found in sequences)


@given(LENGTHS)
def test_at_most_one_sequence_is_at_most_half_full(lengths: list[int]) -> None:
    fills = [
        sum(lengths[piece] for piece in found) for found in pack_sequences(lengths, CAPACITY, 0)
    ]
    # Best fit leaves at most one sequence that is at most half full.
    assert sum(2 * fill <= CAPACITY for fill in fills) <= 1


@given(st.lists(st.integers(2, 50), min_size=1, max_size=20))
def test_split_documents_keep_every_prediction_once(sizes: list[int]) -> None:
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    pieces = split_documents(starts, np.arange(len(sizes)), CAPACITY)
    found = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(pieces.starts, pieces.lengths, strict=True)]
    )
    # The last token of a document predicts nothing.
    expected = np.concatenate([np.arange(a, b - 1) for a, b in pairwise(starts)])
    assert found.tolist() == expected.tolist()
    assert pieces.lengths.max() <= CAPACITY


def test_truncate_documents_removes_only_the_end() -> None:
    pieces = truncate_documents(np.array([0, 5, 25]), np.array([0, 1]), CAPACITY)
    assert pieces.starts.tolist() == [0, 5]
    assert pieces.lengths.tolist() == [4, 16]


def test_order_depends_on_seed_and_epoch() -> None:
    first = shuffled_order(50, 1, 0)
    assert first.tolist() == shuffled_order(50, 1, 0).tolist()
    assert sorted(first.tolist()) == list(range(50))
    assert first.tolist() != shuffled_order(50, 1, 1).tolist()
    assert first.tolist() != shuffled_order(50, 2, 0).tolist()


def test_held_out_rows_and_their_duplicates_are_not_trained_on() -> None:
    digests = np.arange(100, dtype=np.uint64)
    train, held = split_held_out(digests, 5, 3, ALL)
    assert len(held) == 5
    assert not set(train) & set(held)
    assert len(train) == 95
    # Now every row has a copy.
    train, held = split_held_out(digests // 2, 5, 3, ALL)
    assert not set((digests // 2)[train]) & set((digests // 2)[held])
    assert (
        split_held_out(digests, 5, 3, ALL)[1].tolist()
        == split_held_out(digests, 5, 3, ALL)[1].tolist()
    )


def test_at_most_a_tenth_of_few_rows_is_held_out() -> None:
    train, held = split_held_out(np.arange(8, dtype=np.uint64), 64, 0, ALL[:8])
    assert (len(train), len(held)) == (7, 1)


def test_only_rows_with_targets_are_held_out() -> None:
    digests = np.arange(100, dtype=np.uint64)
    train, held = split_held_out(digests, 64, 3, digests % 5 == 0)
    assert len(held) == 2
    assert all(row % 5 == 0 for row in held)
    assert len(train) == 98
