"""Merging chunk results: outputs and every metric reduction."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.client.chunking import FIRST_EXTRA_UNIQUE, REDUCTIONS, merge_outputs, reduce_metrics
from tinkex.types import ForwardBackwardOutput, TensorData

quick = settings(max_examples=60, deadline=None, derandomize=True)


def reduced(key: str, *values: tuple[float, int]) -> dict[str, float]:
    return reduce_metrics([({key: value}, weight) for value, weight in values])


def output(
    count: int, metrics: dict[str, float] | None = None, kind: str = "ArrayRecord"
) -> ForwardBackwardOutput:
    rows = [{"logprobs": TensorData([float(index)], "float32")} for index in range(count)]
    return ForwardBackwardOutput(kind, rows, metrics or {})


# --- metric suffixes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("x:mean", [(1.0, 1), (4.0, 2)], 3.0),
        ("x:mean", [(1.0, 0), (4.0, 2)], 4.0),
        ("x:mean", [(1.0, 0), (4.0, 0)], 0.0),
        ("loss:sum", [(1.5, 1), (2.0, 7)], 3.5),
        ("x:min", [(3.0, 1), (-2.0, 1), (5.0, 1)], -2.0),
        ("x:max", [(3.0, 1), (-2.0, 1), (5.0, 1)], 5.0),
        ("x:slack", [(1.0, 1), (4.0, 2)], 1.0),
        ("x:slack", [(2.0, 3), (2.0, 1)], 0.0),
        ("x:slack", [(1.0, 0), (4.0, 0)], 0.0),
        ("x:hash2", [(5.0, 1), (7.0, 1)], 12.0),
        ("x:hash2", [(-1.0, 1), (2.0, 1)], 1.0),
        ("x:hash2", [(float(2**63), 1), (float(2**63), 1)], 0.0),
        ("x:median", [(1.0, 1), (4.0, 2)], 3.0),
        ("loss", [(1.0, 1), (4.0, 2)], 3.0),
        ("a:b:sum", [(1.0, 1), (4.0, 2)], 5.0),
        ("x:", [(1.0, 1), (4.0, 2)], 3.0),
        ("mean", [(1.0, 1), (4.0, 2)], 3.0),
    ],
)
def test_metric_suffix_selects_reduction(
    key: str, values: list[tuple[float, int]], expected: float
) -> None:
    assert reduced(key, *values) == {key: pytest.approx(expected)}


def test_unique_values_are_numbered_from_two() -> None:
    assert FIRST_EXTRA_UNIQUE == 2
    assert reduced("id:unique", (7.0, 1), (8.0, 1), (9.0, 1)) == {
        "id:unique": 7.0,
        "id:unique_2": 8.0,
        "id:unique_3": 9.0,
    }


def test_hash_unordered_ignores_order() -> None:
    one = reduced("x:hash_unordered", (5.0, 1), (7.0, 2), (1.0, 3))
    other = reduced("x:hash_unordered", (1.0, 1), (5.0, 1), (7.0, 9))
    different = reduced("x:hash_unordered", (1.0, 1), (5.0, 1), (8.0, 9))
    assert one == other != different


def test_every_suffix_has_a_reduction() -> None:
    named = {"mean", "sum", "min", "max", "slack", "hash2", "hash_unordered"}
    assert set(REDUCTIONS) == named


# --- which chunks count -------------------------------------------------------------------


def test_key_missing_in_first_chunk_is_dropped() -> None:
    chunks = [({"a:sum": 1.0}, 1), ({"a:sum": 2.0, "b:sum": 9.0}, 1)]
    assert reduce_metrics(chunks) == {"a:sum": 3.0}


def test_key_missing_in_later_chunk_is_reduced_over_the_rest() -> None:
    chunks = [({"a:mean": 2.0, "b:min": 3.0}, 1), ({}, 10), ({"a:mean": 5.0, "b:min": 4.0}, 2)]
    # Not counted as zero: the middle chunk is ignored.
    assert reduce_metrics(chunks) == {"a:mean": 4.0, "b:min": 3.0}


def test_reduce_without_chunks() -> None:
    assert reduce_metrics([]) == {}
    assert reduce_metrics([({}, 1), ({"a:sum": 1.0}, 1)]) == {}


# --- outputs ------------------------------------------------------------------------------


def test_outputs_are_concatenated_and_metrics_weighted_by_count() -> None:
    first, second = output(1, {"x:mean": 1.0, "loss:sum": 2.0}), output(3, {"x:mean": 5.0})
    merged = merge_outputs([first, second])
    assert merged.loss_fn_outputs == first.loss_fn_outputs + second.loss_fn_outputs
    assert merged.metrics == {"x:mean": 4.0, "loss:sum": 2.0}


def test_single_output_is_returned_unchanged() -> None:
    # Also a name that a stricter parser would reject.
    only = output(0, {"loss": math.nan, "a:b:c": 1.0, "x:mean": 2.0})
    assert merge_outputs([only]) is only


def test_first_chunk_sets_type_and_mismatch_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "tinkex"):
        merged = merge_outputs([output(1, kind="A"), output(1, kind="B")])
    assert merged.loss_fn_output_type == "A"
    assert "different output types: ['A', 'B']" in caplog.text


def test_equal_types_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tinkex"):
        merge_outputs([output(1), output(1)])
    assert caplog.text == ""


def test_merge_of_no_outputs_is_empty() -> None:
    merged = merge_outputs([])
    assert (merged.loss_fn_outputs, merged.metrics) == ([], {})


# --- any input ----------------------------------------------------------------------------

KEYS = st.sampled_from([*(f"m:{name}" for name in REDUCTIONS), "m:unique", "m", "m:odd", ":", ""])
METRICS = st.dictionaries(KEYS, st.floats(), max_size=6)
CHUNKS = st.lists(st.tuples(METRICS, st.integers(0, 5)), max_size=5)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e308, -0.0])
@pytest.mark.parametrize("suffix", [*REDUCTIONS, "unique", "odd"])
def test_non_finite_metrics_reduce_to_floats(suffix: str, odd: float) -> None:
    key = f"m:{suffix}"
    for values in ([(odd, 1)], [(odd, 1), (1.0, 0)], [(1.0, 2), (odd, 1)], [(odd, 0), (odd, 3)]):
        assert isinstance(reduced(key, *values)[key], float)


@quick
@given(CHUNKS)
def test_reduction_never_raises(chunks: list[tuple[dict[str, float], int]]) -> None:
    merged = reduce_metrics(chunks)
    assert all(isinstance(value, float) for value in merged.values())
    assert set(chunks[0][0] if chunks else ()) <= merged.keys()


@quick
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 9)), min_size=1, max_size=6))
def test_reductions_are_within_bounds(values: list[tuple[float, int]]) -> None:
    numbers = [value for value, _ in values]
    slop = 1e-6 * max(1.0, *map(abs, numbers))
    mean = reduced("x:mean", *values)["x:mean"]
    assert min(numbers) - slop <= mean <= max(numbers) + slop
    assert reduced("x:slack", *values)["x:slack"] >= -slop
    assert reduced("x:min", *values)["x:min"] == min(numbers)
    assert reduced("x:max", *values)["x:max"] == max(numbers)
    assert reduced("x:sum", *values)["x:sum"] == pytest.approx(math.fsum(numbers), abs=1e-6)


@quick
@given(st.lists(st.integers(-(2**52), 2**52), min_size=1, max_size=5), st.randoms())
def test_hashes_ignore_chunk_order(numbers: list[int], rng: object) -> None:
    shuffled = list(numbers)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    for key in ("x:hash2", "x:hash_unordered"):
        one = reduced(key, *((float(number), 1) for number in numbers))
        assert one == reduced(key, *((float(number), 1) for number in shuffled))
    expected = float(sum(number & (2**64 - 1) for number in numbers) & (2**64 - 1))
    assert reduced("x:hash2", *((float(number), 1) for number in numbers)) == {"x:hash2": expected}
