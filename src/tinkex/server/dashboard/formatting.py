"""Numbers as people read them: ages, sizes, counts, losses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tinkex.headline_metrics import format_metric, metric_label, select_headlines
from tinkex.units import format_bytes

MISSING = "–"  # noqa: RUF001 - a dash where there is no number, as wide as a digit
_AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
#: Names that users chose are shown up to here.
MAX_NAME_CHARS = 120


def format_duration(seconds: float) -> str:
    """A span of time in its largest unit: 12 s, 3 min, 5 h, 2 d."""
    for unit_seconds, unit in _AGES:
        if seconds >= unit_seconds:
            return f"{int(seconds // unit_seconds):,} {unit}"
    return "0 s"


def format_age(moment: float, now: float) -> str:
    """How long ago a moment was; clocks of other machines may be ahead of ours."""
    seconds = now - moment
    return "just now" if seconds < 1 else f"{format_duration(seconds)} ago"


def format_size(num_bytes: int) -> str:
    """An amount of bytes with its unit."""
    return format_bytes(num_bytes)


def format_count(number: float | None) -> str:
    """A whole number with its thousands apart."""
    return MISSING if number is None else f"{number:,.0f}"


def format_loss(value: float | None) -> str:
    """A loss, or another metric, with enough digits to see it change."""
    return format_metric(value, MISSING)


def format_seconds(value: float) -> str:
    """A duration as measured: 0.012 s, 3.4 s, 120 s."""
    if value < 0.1:
        return f"{max(value, 0.0) * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def format_timestamp(at: float) -> str:
    """A time for machines and tooltips."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def shorten(text: object) -> str:
    """A user's text on one line, cut where it would push everything else away."""
    line = " ".join(str(text).split())
    return line if len(line) <= MAX_NAME_CHARS else line[: MAX_NAME_CHARS - 1] + "…"


def to_sentence(text: str) -> str:
    """An error's words with a capital and a full stop; they begin small to fit into logs."""
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
"""By the names that templates use."""
