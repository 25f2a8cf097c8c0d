"""Pages: template filters that format values, and responses of rendered templates."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined
from litestar import Response

from tinkex.display import (
    format_bytes,
    format_metric,
    format_parameters,
    metric_label,
    select_headlines,
)
from tinkex.ids import path_segment
from tinkex.server.dashboard.static_files import asset_url

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


FILTERS: dict[str, Callable[..., object]] = {
    "ago": format_age,
    "count": format_count,
    "headlines": select_headlines,
    "lasting": format_duration,
    "loss": format_loss,
    "metric_label": metric_label,
    "moment": format_timestamp,
    "parameters": lambda number: format_parameters(number) or MISSING,
    "seconds": format_seconds,
    "sentence": to_sentence,
    "shortened": shorten,
    "size": format_size,
}
"""Template filters by name."""


PAGE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types page"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "vary": "cookie",
    "x-content-type-options": "nosniff",
}
"""Headers of every page: not cached, and other sites can neither frame nor read it."""


def _create_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tinkex.server.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(FILTERS, segment=path_segment)
    environment.globals["asset_url"] = asset_url
    return environment


_ENVIRONMENT = _create_environment()


def render(template: str, **context: object) -> str:
    """Render a template to text."""
    return _ENVIRONMENT.get_template(template).render(context)


def page_response(template: str, *, status: int = 200, **context: object) -> Response[str]:
    """Render a template to a response."""
    return Response(
        render(template, **context),
        status_code=status,
        media_type="text/html",
        headers=dict(PAGE_HEADERS),
    )
