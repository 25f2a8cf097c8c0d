from __future__ import annotations

from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import UnprocessableEntityError
from tinkex.server.http.validation import QUERY_PARAMETERS, parse_query
from tinkex.wire.endpoints import ENDPOINTS

ALL = frozenset(QUERY_PARAMETERS)


def test_every_query_parameter_is_defined() -> None:
    used = {name for row in ENDPOINTS.values() for name in row.query}

    assert used == set(QUERY_PARAMETERS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "1"),
        ("limit", "1000"),
        ("offset", "0"),
        ("offset", str(2**63 - 1)),
        ("access_scope", "owned"),
        ("project_id", "my-project.1"),
        ("search", "100% blue"),
        ("event_type", "all"),
        ("day", "2026-01-31"),
        ("starting_on", "2026-01-31T13:00:00Z"),
        ("ending_before", "2026-01-31T13:00:00+00:00"),
    ],
)
def test_valid_values_are_accepted(name: str, value: str) -> None:
    assert parse_query(urlencode({name: value}).encode(), ALL) == {name: value}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "0"),
        ("limit", "1001"),
        ("limit", "\uff11"),
        ("limit", "1.0"),
        ("limit", "9" * 5000),
        ("offset", "-1"),
        ("offset", str(2**63)),
        ("access_scope", ""),
        ("project_id", "a b"),
        ("search", ""),
        ("search", "x" * 121),
        ("search", "a\x00b"),
        ("project_id", "x" * 256),
        ("event_type", "everything"),
        ("day", "2026-02-30"),
        ("day", "20260131"),
        ("starting_on", "2026-01-31"),
        ("starting_on", "2026-01-31T13:00:00"),
        ("ending_before", "soon"),
    ],
)
def test_invalid_value_error_names_expectation(name: str, value: str) -> None:
    with pytest.raises(UnprocessableEntityError, match=f"^{name} is") as caught:
        parse_query(urlencode({name: value}).encode(), ALL)
    assert len(caught.value.message) < 300


def test_unknown_parameter_error_lists_known_ones() -> None:
    with pytest.raises(UnprocessableEntityError, match="known: limit, offset"):
        parse_query(b"day=2026-01-31", frozenset({"limit", "offset"}))


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_rejected(raw: bytes) -> None:
    try:
        query = parse_query(raw, ALL)
    except UnprocessableEntityError:
        return
    assert set(query) <= ALL


@given(st.sampled_from(sorted(QUERY_PARAMETERS)), st.text(max_size=50))
def test_any_value_is_parsed_or_rejected(name: str, value: str) -> None:
    try:
        raw = urlencode({name: value}).encode()
    except UnicodeEncodeError:
        return
    try:
        query = parse_query(raw, ALL)
    except UnprocessableEntityError:
        return
    assert query == {name: value}
