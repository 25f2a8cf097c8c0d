"""Adaptive batch size: fast operations share a batch, slow ones run alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkex.jobs.fair_queue import MAX_OPERATIONS, TARGET_BATCH_SECONDS, AdaptiveBatchSize


def test_first_batch_is_small() -> None:
    assert AdaptiveBatchSize().max_operations == 1


def test_batch_size_grows_for_fast_operations() -> None:
    pace = AdaptiveBatchSize()
    for _ in range(50):
        pace.record(TARGET_BATCH_SECONDS / 10)
    assert pace.max_operations in {9, 10}


def test_slow_operation_shrinks_batch_immediately() -> None:
    pace = AdaptiveBatchSize()
    for _ in range(50):
        pace.record(0.0)
    assert pace.max_operations == MAX_OPERATIONS
    pace.record(1.0)
    assert pace.max_operations == 1


@given(st.lists(st.floats(0.0, 1e6), max_size=30))
def test_batch_size_is_bounded(times: list[float]) -> None:
    pace = AdaptiveBatchSize()
    for seconds in times:
        pace.record(seconds)
    assert 1 <= pace.max_operations <= MAX_OPERATIONS


def test_timed_operation_is_counted() -> None:
    pace = AdaptiveBatchSize()
    assert pace.run_timed(max, 1, 2) == 2
    for _ in range(50):
        pace.run_timed(max, 1, 2)
    assert pace.max_operations > 1
