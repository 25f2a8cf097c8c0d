"""Splitting examples into micro-batches, and packing them."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.examples import TrainingExample
from tinkex.engine.micro_batches import ExampleRef, pack_examples, split_micro_batches

many_lengths = st.lists(st.lists(st.integers(1, 40), max_size=12), max_size=4)


def example(length: int, width: int = 1, start: int = 0) -> TrainingExample:
    targets = np.arange(start, start + length * width)
    return TrainingExample(
        tokens=np.arange(start, start + length),
        targets=targets,
        rows=np.repeat(np.arange(length), width),
        shape=(length, width),
        inputs={},
    )


def tokens_of(batch: tuple[ExampleRef, ...], lengths: list[list[int]]) -> int:
    return sum(lengths[piece.pass_index][piece.example_index] for piece in batch)


@given(lengths=many_lengths, max_tokens=st.integers(1, 100))
def test_every_example_is_in_one_micro_batch_within_limit(
    lengths: list[list[int]], max_tokens: int
) -> None:
    batches = split_micro_batches(lengths, max_tokens)
    pieces = [piece for batch in batches for piece in batch]
    wanted = {(p, e) for p, row in enumerate(lengths) for e in range(len(row))}
    assert len(pieces) == len(wanted)
    assert set(pieces) == wanted
    for batch in batches:
        assert batch
        assert tokens_of(batch, lengths) <= max_tokens or len(batch) == 1


@given(lengths=many_lengths, max_tokens=st.integers(1, 100))
def test_passes_are_contiguous_and_sorted_by_length(
    lengths: list[list[int]], max_tokens: int
) -> None:
    for batch in split_micro_batches(lengths, max_tokens):
        passes = [index for index, _ in groupby(piece.pass_index for piece in batch)]
        assert passes == sorted(set(passes))
        for index in passes:
            row = [lengths[p][e] for p, e in batch if p == index]
            assert row == sorted(row)


@given(lengths=many_lengths, max_tokens=st.integers(1, 100))
def test_number_of_micro_batches_is_minimal(lengths: list[list[int]], max_tokens: int) -> None:
    ordered = [length for row in lengths for length in sorted(row)]
    num_batches = sum(length > max_tokens for length in ordered)
    remaining = 0
    for length in (length for length in ordered if length <= max_tokens):
        if length > remaining:
            num_batches, remaining = num_batches + 1, max_tokens
        remaining -= length
    assert len(split_micro_batches(lengths, max_tokens)) == num_batches


@given(length=st.integers(1, 30), count=st.integers(1, 60), max_tokens=st.integers(30, 200))
def test_equal_lengths_are_balanced(length: int, count: int, max_tokens: int) -> None:
    sizes = [len(batch) for batch in split_micro_batches([[length] * count], max_tokens)]
    assert max(sizes) - min(sizes) <= 1


def test_no_small_last_micro_batch() -> None:
    lengths = [[10] * 41]
    assert [tokens_of(batch, lengths) for batch in split_micro_batches(lengths, 400)] == [200, 210]


def test_too_long_example_is_alone() -> None:
    assert split_micro_batches([[3, 50, 2], [4]], 10) == [((0, 2), (0, 0), (1, 0)), ((0, 1),)]


def test_one_micro_batch_if_everything_fits() -> None:
    assert split_micro_batches([[3, 1], [2, 3, 2]], 11) == [
        ((0, 1), (0, 0), (1, 0), (1, 2), (1, 1))
    ]


def test_no_examples_no_micro_batches() -> None:
    assert split_micro_batches([], 10) == []
    assert split_micro_batches([[], []], 10) == []


def test_examples_are_packed_without_padding() -> None:
    packed = pack_examples([example(2, start=10), example(3, width=2, start=20)])
    assert packed.tokens_T.tolist() == [10, 11, 20, 21, 22]
    assert packed.positions_T.tolist() == [0, 1, 0, 1, 2]
    assert packed.lengths == [2, 3]
    assert packed.rows_P.tolist() == [0, 1, 2, 2, 3, 3, 4, 4]
    assert packed.targets_P.tolist() == [10, 11, 20, 21, 22, 23, 24, 25]
    assert [part.tolist() for part in packed.split_by_example(packed.targets_P)] == [
        [10, 11],
        [20, 21, 22, 23, 24, 25],
    ]


@given(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=6))
def test_pairs_refer_to_their_own_example(sizes: list[tuple[int, int]]) -> None:
    given_ = [example(length, width, start=100 * at) for at, (length, width) in enumerate(sizes)]
    packed = pack_examples(given_)
    parts = packed.split_by_example(packed.rows_P)
    for each, rows in zip(given_, parts, strict=True):
        assert packed.tokens_T[rows].tolist() == each.tokens[each.rows].tolist()
        assert packed.positions_T[rows].tolist() == each.rows.tolist()
