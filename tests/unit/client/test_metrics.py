"""Counters and percentiles."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.client.metrics import PERCENTILE_WINDOW, MetricsRecorder, Timing, percentile


def timing(seconds: float, operation: str = "sample", ok: bool = True) -> Timing:
    return Timing(operation=operation, seconds=seconds, submit_seconds=0.1, ok=ok)


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [
        ([], 0.5, 0.0),
        ([3.0], 0.99, 3.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0),
        ([float(n) for n in range(1, 101)], 0.50, 50.0),
        ([float(n) for n in range(1, 101)], 0.90, 90.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
        ([float(n) for n in range(1, 101)], 1.0, 100.0),
        ([1.0, 2.0], 0.0, 1.0),
    ],
)
def test_percentile_is_nearest_rank(values: list[float], fraction: float, expected: float) -> None:
    assert percentile(values, fraction) == expected


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.0, 1e6), min_size=1), st.sampled_from([0.5, 0.9, 0.99]))
def test_percentile_is_a_value_of_the_list(values: list[float], fraction: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, fraction)
    assert found in values
    share = sum(value <= found for value in values) / len(values)
    assert share >= fraction - 1e-9


def test_operations_are_summarized() -> None:
    watch = MetricsRecorder()
    for seconds in (1.0, 3.0, 2.0):
        watch.record(timing(seconds))
    watch.record(timing(10.0, ok=False))
    watch.record(timing(0.5, "optim_step"))
    metrics = watch.snapshot()
    assert set(metrics.operations) == {"sample", "optim_step"}
    summary = metrics.operations["sample"]
    assert dataclasses.asdict(summary) == {
        "count": 4,
        "failed": 1,
        "total_seconds": 16.0,
        "p50_seconds": 2.0,
        "p90_seconds": 10.0,
        "p99_seconds": 10.0,
        "max_seconds": 10.0,
    }


def test_percentiles_cover_latest_and_totals_cover_all() -> None:
    watch = MetricsRecorder()
    watch.record(timing(100.0))
    for _ in range(PERCENTILE_WINDOW):
        watch.record(timing(1.0))
    summary = watch.snapshot().operations["sample"]
    assert (summary.count, summary.max_seconds) == (PERCENTILE_WINDOW + 1, 100.0)
    assert summary.p99_seconds == 1.0


def test_snapshot_is_immutable() -> None:
    watch = MetricsRecorder()
    watch.counters["requests"] += 1
    before = watch.snapshot()
    watch.counters["requests"] += 1
    watch.record(timing(1.0))
    assert before.counters == {"requests": 1}
    assert before.operations == {}
    assert watch.snapshot().counters == {"requests": 2}


def test_recorders_are_independent() -> None:
    one, other = MetricsRecorder(), MetricsRecorder()
    one.record(timing(1.0))
    one.counters["polls"] += 1
    assert other.snapshot().operations == {}
    assert other.snapshot().counters == {}
