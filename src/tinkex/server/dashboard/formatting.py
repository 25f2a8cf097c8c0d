"""Formatting of ages, sizes, counts, metrics and names; used as template filters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tinkex.headline_metrics import format_metric, metric_label, select_headlines
from tinkex.units import format_bytes

MISSING = "–"  # noqa: RUF001 - an en dash is as wide as a digit
_AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
#: Longer user-chosen names are cut.
MAX_NAME_CHARS = 120


def format_duration(seconds: float) -> str:
    """Format a duration in its largest unit: 12 s, 3 min, 5 h, 2 d."""
    for unit_seconds, unit in _AGES:
        if seconds >= unit_seconds:
            return f"{int(seconds // unit_seconds):,} {unit}"
    return "0 s"


def format_age(moment: float, now: float) -> str:
    """Format the age of a timestamp, which may be slightly in the future by clock skew."""
    seconds = now - moment
    return "just now" if seconds < 1 else f"{format_duration(seconds)} ago"


def format_size(num_bytes: int) -> str:
    """Format a number of bytes with its unit."""
    return format_bytes(num_bytes)


def format_count(number: float | None) -> str:
    """Format a whole number with thousands separators."""
    return MISSING if number is None else f"{number:,.0f}"


def format_loss(value: float | None) -> str:
    """Format a metric with enough digits to see it change."""
    return format_metric(value, MISSING)


def format_seconds(value: float) -> str:
    """Format a measured duration: 12 ms, 3.4 s, 120 s."""
    if value < 0.1:
        return f"{max(value, 0.0) * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def format_timestamp(at: float) -> str:
    """Format a time in ISO 8601, for the datetime attribute and tooltips."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def shorten(text: object) -> str:
    """Put a user's text on one line and cut it to a maximum length."""
    line = " ".join(str(text).split())
    return line if len(line) <= MAX_NAME_CHARS else line[: MAX_NAME_CHARS - 1] + "…"


def to_sentence(text: str) -> str:
    """Turn an error message into a sentence with a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "…")) else ".")


FILTERS: dict[str, Any] = {
    "ago": format_age,
    "count": format_count,
    "headlines": select_headlines,
    "lasting": format_duration,
    "loss": format_loss,
    "metric_label": metric_label,
    "moment": format_timestamp,
    "seconds": format_seconds,
    "sentence": to_sentence,
    "shortened": shorten,
    "size": format_size,
}
"""Template filters by name."""
