"""Formatting of sizes, times and counts, with edge cases."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tinkex
from tinkex.cli import format as words

SOURCES = Path(tinkex.__file__).parent
NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1536, "1.5 kB"),
        (1024, "1.0 kB"),
        (10**6 - 1, "1.0 MB"),
        (183_500_800, "184 MB"),
        (10**15, "1.0 PB"),
        (10**18, "1.0 EB"),
        (10**21 * 5000, "5,000 ZB"),
        (-1, "N/A"),
        (None, "N/A"),
        (float("nan"), "N/A"),
    ],
)
def test_sizes(size: float | None, text: str) -> None:
    assert words.format_size(size) == text


@pytest.mark.parametrize(
    ("ago", "text"),
    [
        (timedelta(0), "just now"),
        (timedelta(seconds=59), "just now"),
        (timedelta(seconds=60), "1 minute ago"),
        (timedelta(minutes=59), "59 minutes ago"),
        (timedelta(hours=1), "1 hour ago"),
        (timedelta(hours=47), "1 day ago"),
        (timedelta(days=13), "1 week ago"),
        (timedelta(days=29), "4 weeks ago"),
        (timedelta(days=30), "2026-04-01"),
        (timedelta(seconds=-30), "in less than a minute"),
        (timedelta(hours=-2), "in 2 hours"),
        (timedelta(seconds=-86341), "in 1 day"),
        (timedelta(seconds=-86340), "in 23 hours"),
        (timedelta(days=-60), "2026-06-30"),
    ],
)
def test_timestamps_are_formatted_relative_to_now(ago: timedelta, text: str) -> None:
    then = NOW - ago
    assert words.format_timestamp(then, NOW) == text
    assert words.format_timestamp(then.isoformat(), NOW) == text
    assert words.format_timestamp(then.replace(tzinfo=None), NOW) == text
    assert words.format_timestamp(then.astimezone(timezone(timedelta(hours=9))), NOW) == text


@pytest.mark.parametrize(("when", "text"), [(None, "N/A"), ("", "N/A"), ("soon", "soon")])
def test_missing_and_invalid_times_are_formatted(when: str | None, text: str) -> None:
    assert words.format_timestamp(when, NOW) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0286, "29ms"),
        (0.44, "0.4s"),
        (12.4, "12s"),
        (59.6, "1m 00s"),
        (185, "3m 05s"),
        (7800, "2h 10m"),
        (352800, "4d 02h"),
        (-1, "N/A"),
        (None, "N/A"),
        (float("inf"), "N/A"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert words.format_duration(seconds) == text


def test_bool_and_optional() -> None:
    assert (words.format_bool(True), words.format_bool(False)) == ("Yes", "No")
    assert (words.format_optional(None), words.format_optional(0)) == ("N/A", "0")
    assert words.format_optional(1024, words.format_size) == "1.0 kB"
    assert [words.format_count(n, "run") for n in (0, 1, 1200)] == ["0 runs", "1 run", "1,200 runs"]


@given(st.text())
def test_escape_line_returns_one_printable_line(text: str) -> None:
    assert words.escape_line(text).isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a run", "a run"), ("a longer name", "a longe…"), ("日本語日本", "日本語 …")],
)
def test_truncate_cells(text: str, shown: str) -> None:
    assert words.truncate_cells(text, 8) == shown


#: Counts with a fixed plural: "{num} rows".
_COUNT = re.compile(
    r"\{(?:len\([^}]*\)|num_\w+|count|size|used)(?::,)?\} "
    r"(?:models|runs|rows|steps|checkpoints|sessions|files|keys|samples|messages|times)\b"
)


def test_commands_use_format_count_for_counts() -> None:
    packages = ("cli", "recipes", "pipeline", "jobs")
    places = [path for name in packages for path in (SOURCES / name).rglob("*.py")]
    found = [
        f"{path.relative_to(SOURCES)}: {match[0]}"
        for path in places
        for match in _COUNT.finditer(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("key", "shown"),
    [("started_at", "Started At"), ("url", "URL"), ("training_run_id", "Training Run ID")],
)
def test_property_labels(key: str, shown: str) -> None:
    assert words.property_label(key) == shown
