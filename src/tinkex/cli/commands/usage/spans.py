"""Spans of time that usage can be asked for: full hours, at most 14 days."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click

MAX_PERIOD = timedelta(days=14)
#: How far back to look if nobody says.
DEFAULT_PERIOD = timedelta(days=7)
_HOUR = timedelta(hours=1)
_HOUR_EXAMPLE = "write a day as 2026-01-31 or an hour as 2026-01-31T13:00:00Z"


class FullHour(click.ParamType[datetime]):
    """A full hour with a time zone; a day is its first hour in UTC."""

    name = "hour"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The hour."""
        if isinstance(value, datetime):
            return value
        try:
            found = datetime.fromisoformat(value.strip())
        except ValueError:
            self.fail(f"{value!r} is no date or time; {_HOUR_EXAMPLE}", param, ctx)
        if found.tzinfo is None and len(value.strip()) <= len("2026-01-31"):
            found = found.replace(tzinfo=UTC)
        if found.tzinfo is None:
            self.fail(f"{value!r} has no time zone; {_HOUR_EXAMPLE}", param, ctx)
        found = found.astimezone(UTC)
        if found.minute or found.second or found.microsecond:
            self.fail(f"{value!r} is no full hour; {_HOUR_EXAMPLE}", param, ctx)
        return found


def resolve_period(
    start: datetime | None, end: datetime | None, now: datetime, default: timedelta = DEFAULT_PERIOD
) -> tuple[datetime, datetime]:
    """Both ends, the missing ones filled in; the running hour is part of it."""
    this_hour = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    end = end or min(this_hour + _HOUR, (start or this_hour) + MAX_PERIOD)
    start = start or end - default
    if start >= end:
        raise click.UsageError(
            f"the span ends at {_format_utc(end)}, before it begins at {_format_utc(start)}"
        )
    if end - start > MAX_PERIOD:
        days = (end - start) / timedelta(days=1)
        raise click.UsageError(
            f"the span from {_format_utc(start)} to {_format_utc(end)} has {days:.4g} days; 14 is the most"
        )
    return start, end


def _format_utc(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")
