from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.dashboard import rendering


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "just now"),
        (0.4, "just now"),
        (1, "1 s ago"),
        (59.9, "59 s ago"),
        (60, "1 min ago"),
        (7199, "1 h ago"),
        (86_400 * 1500, "1,500 d ago"),
    ],
)
def test_age_uses_largest_unit(seconds: float, text: str) -> None:
    assert rendering.format_age(1000.0 - seconds, 1000.0) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_940, "99.9 kB"),
        (99_960, "100 kB"),
        (999_600, "1.0 MB"),
        (123_456_789, "123 MB"),
        (10**18, "1.0 EB"),
    ],
)
def test_sizes_have_a_unit_and_few_digits(num_bytes: int, text: str) -> None:
    assert rendering.format_size(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, rendering.MISSING),
        (0.0, "0.0000"),
        (2.34567, "2.3457"),
        (-1.5, "-1.5000"),
        (0.00001234, "1.234e-05"),
        (1e9, "1.000e+09"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_losses_show_enough_digits(value: float | None, text: str) -> None:
    assert rendering.format_loss(value) == text


def test_durations_and_counts() -> None:
    assert [rendering.format_seconds(value) for value in (-1, 0.012, 3.44, 1234)] == [
        "0 ms",
        "12 ms",
        "3.4 s",
        "1,234 s",
    ]
    assert (rendering.format_count(None), rendering.format_count(1234567)) == (
        rendering.MISSING,
        "1,234,567",
    )


@given(st.text())
def test_user_text_is_shortened_to_one_line(text: str) -> None:
    shown = rendering.shorten(text)

    assert len(shown) <= rendering.MAX_NAME_CHARS
    assert "\n" not in shown
    assert "\r" not in shown


def test_error_message_becomes_sentence() -> None:
    assert rendering.to_sentence("run 'x' does not exist") == "Run 'x' does not exist."
    assert rendering.to_sentence("Try again.") == "Try again."
