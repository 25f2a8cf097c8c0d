"""Parsing of TTLs and dates."""

from __future__ import annotations

from datetime import UTC, datetime

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.commands.time_params import IsoDateTime, Lifetime, to_utc


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3600", 3600),
        ("45s", 45),
        ("90m", 5400),
        ("12h", 43200),
        ("7d", 604800),
        (" 2 w ", 1209600),
    ],
)
def test_lifetime_is_parsed_with_units(text: str, seconds: int) -> None:
    assert Lifetime().convert(text, None, None) == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "0d", "-1", "1.5d", "7 days", "d", "1y", "11000d", "9999999999w"]
)
def test_invalid_lifetime_is_rejected(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a lifetime; write it as 7d"):
        Lifetime().convert(text, None, None)


@given(text=st.text(max_size=20))
def test_any_text_is_a_lifetime_or_rejected(text: str) -> None:
    try:
        assert Lifetime().convert(text, None, None) >= 1
    except click.BadParameter as error:
        assert repr(text) in error.message


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("2026-01-31T08:00", datetime(2026, 1, 31, 8, tzinfo=UTC)),
        ("2026-01-31T08:00:00Z", datetime(2026, 1, 31, 8, tzinfo=UTC)),
        ("2026-01-31 08:00:00+02:00", datetime(2026, 1, 31, 6, tzinfo=UTC)),
    ],
)
def test_time_without_offset_is_utc(text: str, moment: datetime) -> None:
    assert IsoDateTime().convert(text, None, None) == moment


@given(text=st.text(max_size=30) | st.just("0001-01-01T00:00+23:59"))
def test_any_text_is_a_time_or_rejected(text: str) -> None:
    try:
        assert IsoDateTime().convert(text, None, None).tzinfo is UTC
    except click.BadParameter as error:
        assert "is not a date; write it as 2026-01-31" in error.message


@given(moment=st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)))
def test_server_times_without_offset_are_comparable(moment: datetime) -> None:
    assert to_utc(moment) == moment.replace(tzinfo=UTC)
