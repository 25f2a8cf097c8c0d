"""Usage periods: full hours, at most 14 days, and errors."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.commands.time_params import MAX_PERIOD, FullHour, resolve_period
from tinkex.cli.main import run

NOW = datetime(2026, 3, 10, 12, 34, tzinfo=UTC)


def hour(text: str) -> datetime:
    found: datetime = FullHour().convert(text, None, None)
    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2026-03-01", datetime(2026, 3, 1, tzinfo=UTC)),
        ("2026-03-01T05:00:00Z", datetime(2026, 3, 1, 5, tzinfo=UTC)),
        ("2026-03-01T05:00:00+02:00", datetime(2026, 3, 1, 3, tzinfo=UTC)),
        (" 2026-03-01T05:00Z ", datetime(2026, 3, 1, 5, tzinfo=UTC)),
    ],
)
def test_days_and_hours(text: str, found: datetime) -> None:
    assert hour(text) == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("yesterday", "is not a date or time"),
        ("2026-02-30", "is not a date or time"),
        ("", "is not a date or time"),
        ("2026-03-01T05:00:00", "has no time zone"),
        ("2026-03-01T05:30:00Z", "is not a full hour"),
        ("2026-03-01T05:00:00.5Z", "is not a full hour"),
    ],
)
def test_invalid_hour_error_shows_format(text: str, reason: str) -> None:
    with pytest.raises(click.BadParameter, match=reason) as refused:
        hour(text)
    assert "2026-01-31T13:00:00Z" in refused.value.message


def test_missing_period_ends_are_filled_in() -> None:
    assert resolve_period(None, None, NOW) == (
        datetime(2026, 3, 3, 13, tzinfo=UTC),
        datetime(2026, 3, 10, 13, tzinfo=UTC),
    )
    old = datetime(2026, 1, 1, tzinfo=UTC)
    assert resolve_period(old, None, NOW) == (old, old + MAX_PERIOD)
    assert resolve_period(None, old, NOW) == (old - timedelta(days=7), old)


def test_period_order_and_length_are_checked() -> None:
    start = datetime(2026, 3, 1, tzinfo=UTC)
    assert resolve_period(start, start + MAX_PERIOD, NOW)[0] == start
    with pytest.raises(click.UsageError, match="before it starts"):
        resolve_period(start, start, NOW)
    with pytest.raises(click.UsageError, match=r"has 14\.04 days; the maximum is 14"):
        resolve_period(start, start + MAX_PERIOD + timedelta(hours=1), NOW)


@pytest.mark.parametrize("words", [["usage", "tokens"], ["billing", "usage"]])
def test_dates_are_checked_before_any_request(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "2026-01-01", "2026-02-01"]).exit_code == 2
    assert "has 31 days; the maximum is 14" in capsys.readouterr().err
    assert run([*words, "x", "2026-02-01"]).exit_code == 2
    assert "'x' is not a date or time" in capsys.readouterr().err


@given(st.text())
def test_any_text_is_an_hour_or_rejected(text: str) -> None:
    try:
        found = hour(text)
    except click.BadParameter as error:
        assert "write a day as" in error.message
    else:
        assert (found.minute, found.second, found.tzinfo) == (0, 0, UTC)
