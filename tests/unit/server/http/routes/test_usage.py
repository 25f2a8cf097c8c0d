from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import UnprocessableEntityError
from tinkex.server.http.routes.usage import (
    GIGABYTE,
    HOUR_SECONDS,
    HourRange,
    parse_hour_range,
    sum_storage,
    sum_usage,
)
from tinkex.store.records import CheckpointRecord, UsageRecord

WEEK = HourRange(0.0, 7 * 24 * 3600.0)


def usage(kind: str, amount: int, **fields: Any) -> UsageRecord:
    place = {"tenant_id": "t", "session_id": "s", "run_id": "r", "base_model": "m", "hour": 3}
    return UsageRecord(**(place | fields), kind=kind, amount=amount)


def checkpoint(
    created_at: float, size_bytes: int = GIGABYTE, expires_at: float | None = None
) -> Any:
    return CheckpointRecord(
        id="c",
        tenant_id="t",
        session_id="s",
        project_id="p",
        run_id="r",
        segment="weights",
        name="n",
        base_model="m",
        spec={},
        size_bytes=size_bytes,
        created_at=created_at,
        expires_at=expires_at,
    )


def test_usage_is_summed_over_runs_of_session() -> None:
    rows = [usage("training", 3), usage("training", 4, run_id="other"), usage("sample", 5)]

    uses = [use.info for use in sum_usage(rows).values()]

    assert [(info.type, info.token_count) for info in uses] == [
        ("training", 7),
        ("sampling_sample", 5),
    ]


def test_unknown_usage_kinds_are_omitted() -> None:
    assert sum_usage([usage("electricity", 3)]) == {}


def test_storage_counts_fractions_of_hours() -> None:
    items = sum_storage([checkpoint(HOUR_SECONDS / 2)], WEEK, now=2.25 * HOUR_SECONDS)

    shares = [(use.hour, use.info.gigabyte_hours) for use in items]
    assert shares == [(0, 0.5), (1, 1.0), (2, 0.25)]


@given(
    st.lists(
        st.tuples(
            st.floats(0, 3e6),
            st.integers(0, 10**12),
            st.none() | st.floats(0, 3e6),
        ),
        max_size=5,
    ),
    st.floats(0, 3e6),
)
def test_storage_is_size_times_time_within_range(
    rows: list[tuple[float, int, float | None]], now: float
) -> None:
    stored = sum_storage([checkpoint(*row) for row in rows], WEEK, now)

    total = sum(use.info.gigabyte_hours for use in stored)

    expected = sum(
        size / GIGABYTE * max(0.0, min(WEEK.end, now, end) - created) / HOUR_SECONDS
        for created, size, expires in rows
        for end in [now if expires is None else expires]
    )
    assert total == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_hour_range_in_any_time_zone() -> None:
    span = parse_hour_range("2026-01-01T00:00:00+05:00", "2026-01-01T02:00:00+05:00")

    assert span.end - span.start == 2 * HOUR_SECONDS
    assert span == parse_hour_range("2025-12-31T19:00:00Z", "2025-12-31T21:00:00Z")


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (None, "2026-01-01T00:00:00Z"),
        ("2026-01-01T00:00:00Z", None),
        ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z"),
        ("2026-01-01T00:00:01Z", "2026-01-01T01:00:00Z"),
        ("2026-01-01T00:00:00+05:30", "2026-01-01T01:00:00Z"),
        ("2026-01-01T00:00:00Z", "2026-01-15T01:00:00Z"),
    ],
)
def test_invalid_hour_ranges_are_rejected(start: str | None, end: str | None) -> None:
    with pytest.raises(UnprocessableEntityError):
        parse_hour_range(start, end)
