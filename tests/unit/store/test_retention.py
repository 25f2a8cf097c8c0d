"""Limits of a sweep, and invalid retention policies."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ConfigError
from tinkex.store.retention import RetentionPolicy, take_within_limits

_ROWS = st.lists(st.integers(0, 100)).map(
    lambda sizes: [(str(place), size) for place, size in enumerate(sizes)]
)


@given(_ROWS, st.integers(1, 20), st.integers(0, 300))
def test_take_within_limits_fills_the_limits(
    rows: list[tuple[str, int]], max_rows: int, max_bytes: int
) -> None:
    chosen = take_within_limits(rows, max_rows, max_bytes)
    assert chosen == [row_id for row_id, _ in rows[: len(chosen)]]
    sizes = [size for _, size in rows]
    if len(chosen) > 1:
        assert len(chosen) <= max_rows
        assert sum(sizes[: len(chosen)]) <= max_bytes
    if len(chosen) < len(rows):
        # One more would exceed the limit, and an empty selection would loop for ever.
        assert chosen
        assert len(chosen) == max_rows or sum(sizes[: len(chosen) + 1]) > max_bytes


def test_invalid_policy_is_refused_by_name() -> None:
    for field in fields(RetentionPolicy):
        with pytest.raises(ConfigError, match=f"{field.name} must not be negative, got -1"):
            RetentionPolicy(**{field.name: -1})
