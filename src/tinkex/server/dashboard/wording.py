"""Numbers as people read them: ages, sizes, counts, losses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tinkex.server.headlines import format_metric, headlines, metric_label
from tinkex.units import format_bytes

MISSING = "–"  # noqa: RUF001 - a dash where there is no number, as wide as a digit
_AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
#: Names that users chose are shown up to here.
MAX_NAME_CHARS = 120


def lasting(seconds: float) -> str:
    """A span of time in its largest unit: 12 s, 3 min, 5 h, 2 d."""
    for unit_seconds, unit in _AGES:
        if seconds >= unit_seconds:
            return f"{int(seconds // unit_seconds):,} {unit}"
    return "0 s"


def ago(moment: float, now: float) -> str:
    """How long ago a moment was; clocks of other machines may be ahead of ours."""
    seconds = now - moment
    return "just now" if seconds < 1 else f"{lasting(seconds)} ago"


def size(num_bytes: int) -> str:
    """An amount of bytes with its unit."""
    return format_bytes(num_bytes)


def count(number: float | None) -> str:
    """A whole number with its thousands apart."""
    return MISSING if number is None else f"{number:,.0f}"


def loss(value: float | None) -> str:
    """A loss, or another metric, with enough digits to see it change."""
    return format_metric(value, MISSING)


def seconds(value: float) -> str:
    """A duration as measured: 0.012 s, 3.4 s, 120 s."""
    if value < 0.1:
        return f"{max(value, 0.0) * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def moment(at: float) -> str:
    """A time for machines and tooltips."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def shortened(text: object) -> str:
    """A user's text on one line, cut where it would push everything else away."""
    line = " ".join(str(text).split())
    return line if len(line) <= MAX_NAME_CHARS else line[: MAX_NAME_CHARS - 1] + "…"


def sentence(text: str) -> str:
    """An error's words with a capital and a full stop; they begin small to fit into logs."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "…")) else ".")


FILTERS: dict[str, Any] = {
    "ago": ago,
    "count": count,
    "headlines": headlines,
    "lasting": lasting,
    "loss": loss,
    "metric_label": metric_label,
    "moment": moment,
    "seconds": seconds,
    "sentence": sentence,
    "shortened": shortened,
    "size": size,
}
"""By the names that templates use."""
