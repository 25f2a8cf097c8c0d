"""Splitting a batch by count and size."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.client.chunking import (
    MAX_CHUNK_BYTES,
    MAX_CHUNK_ITEMS,
    DatumChunk,
    datum_bytes,
    input_chunk_bytes,
    split_chunks,
)
from tinkex.errors import InvalidInput
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    TensorData,
)


class Sized:
    """A minimal Datum for splitting: an input of the given size."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.model_input = self
        self.chunks = [self]
        self.data = range(num_bytes)
        self.loss_fn_inputs: dict[str, TensorData] = {}


def sizes(chunks: list[DatumChunk]) -> list[list[int]]:
    return [[datum.num_bytes for datum in chunk.data] for chunk in chunks]  # type: ignore[attr-defined]


def cut(numbers: list[int], *limits: int) -> list[list[int]]:
    data: Any = [Sized(number) for number in numbers]
    return sizes(split_chunks(data, *limits))


def test_small_batch_is_one_chunk() -> None:
    assert cut([1, 2, 3]) == [[1, 2, 3]]


def test_oversized_datum_gets_its_own_chunk() -> None:
    assert cut([6_000_000]) == [[6_000_000]]
    assert cut([6_000_000, 1]) == [[6_000_000], [1]]
    assert cut([1, 6_000_000, 1]) == [[1], [6_000_000], [1]]


def test_chunk_may_reach_limits_exactly() -> None:
    assert (MAX_CHUNK_ITEMS, MAX_CHUNK_BYTES) == (1024, 5_000_000)
    assert cut([2_500_000, 2_500_000, 1]) == [[2_500_000, 2_500_000], [1]]
    assert [len(chunk) for chunk in cut([1] * 1024)] == [1024]
    assert [len(chunk) for chunk in cut([1] * 1025)] == [1024, 1]
    assert [len(chunk) for chunk in cut([1] * 2049)] == [1024, 1024, 1]


def test_split_uses_given_limits() -> None:
    assert cut([1, 1, 1], 2) == [[1, 1], [1]]
    assert cut([4, 4, 4], 10, 8) == [[4, 4], [4]]
    # Nonsensical server limits still work.
    assert cut([1, 1], 0, 0) == [[1], [1]]


def test_empty_batch_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="No data provided"):
        split_chunks([])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 10), st.integers(1, 60)
)
def test_chunks_concatenate_to_batch(numbers: list[int], max_items: int, max_bytes: int) -> None:
    data: Any = [Sized(number) for number in numbers]
    chunks = split_chunks(data, max_items, max_bytes)
    joined = [datum for chunk in chunks for datum in chunk.data]
    assert all(one is other for one, other in zip(joined, data, strict=True))
    for chunk in chunks:
        assert 1 <= len(chunk.data) <= max_items
        assert chunk.num_bytes == sum(datum_bytes(datum) for datum in chunk.data)
        assert chunk.num_bytes <= max_bytes or len(chunk.data) == 1
    # Chunks are maximal: the next datum would not have fitted.
    for chunk, following in pairwise(chunks):
        is_full = len(chunk.data) == max_items
        assert is_full or chunk.num_bytes + datum_bytes(following.data[0]) > max_bytes


# --- sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (EncodedTextChunk(tokens=[1, 2, 3]), 12),
        (EncodedTextChunk(tokens=[]), 0),
        (ImageChunk(data=b"12345", format="png"), 5),
        (ImageChunk(data=b"", format="png"), 0),
        (DmelChunk(dmel=b"123"), 3),
        (ImageAssetPointerChunk(location="s3://x", format="png"), 6),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else type(value).__name__,
)
def test_input_chunk_sizes(piece: Any, expected: int) -> None:
    assert input_chunk_bytes(piece) == expected


def test_unknown_input_chunk_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="Unsupported model input chunk: object"):
        input_chunk_bytes(object())


def test_datum_size_is_inputs_plus_tensors() -> None:
    datum = Datum(
        model_input=ModelInput(
            chunks=[EncodedTextChunk(tokens=[1, 2]), ImageChunk(data=b"1234567", format="jpeg")]
        ),
        loss_fn_inputs={
            "target_tokens": TensorData([1, 2, 3], "int64"),
            "weights": TensorData([0.5, 1.0, 0.0], "float32"),
        },
    )
    assert datum_bytes(datum) == 8 + 7 + 3 * 8 + 3 * 4


def test_sparse_tensor_size_includes_indices() -> None:
    sparse = TensorData([1.0, 2.0], "float32", [3, 4], [0, 1, 1, 2], [3, 0])
    datum = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"weights": sparse})
    assert datum_bytes(datum) == 4 + 2 * 4 + (4 + 2) * 8
