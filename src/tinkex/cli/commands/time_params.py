"""click parameter types for TTLs, dates and hours, and the default period of reports."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import click

from tinkex.errors import InvalidInput
from tinkex.ids import check_ttl

_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_LIFETIME = re.compile(r"(\d{1,12})\s*([smhdw]?)", re.ASCII)


class Lifetime(click.ParamType[int]):
    """The TTL of a checkpoint, such as 7d, 12h or 2w; a bare number is in seconds."""

    name = "lifetime"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Parse the TTL into seconds."""
        if isinstance(value, int):
            return value
        match = _LIFETIME.fullmatch(str(value).strip())
        seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else 0
        try:
            check_ttl(seconds)
        except InvalidInput:
            self.fail(
                f"{value!r} is not a lifetime; write it as 7d, 12h, 90m or in seconds, at most 10 "
                "years",
                param,
                ctx,
            )
        return seconds


class IsoDateTime(click.ParamType[datetime]):
    """A date or a time in ISO 8601; without an offset it is in UTC."""

    name = "moment"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        """Parse the time; a date means midnight."""
        if isinstance(value, datetime):
            return value
        try:
            return to_utc(datetime.fromisoformat(str(value).strip()))
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is not a date; write it as 2026-01-31 or 2026-01-31T08:00:00Z",
                param,
                ctx,
            )


def to_utc(moment: datetime) -> datetime:
    """Convert a time to UTC; without an offset it is in UTC already."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


MAX_PERIOD = timedelta(days=14)
#: Length of a period whose start is not given.
DEFAULT_PERIOD = timedelta(days=7)
_HOUR = timedelta(hours=1)
_HOUR_EXAMPLE = "write a day as 2026-01-31 or an hour as 2026-01-31T13:00:00Z"


class FullHour(click.ParamType[datetime]):
    """A full hour with a time zone; a date means midnight UTC."""

    name = "hour"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        """Parse the hour."""
        if isinstance(value, datetime):
            return value
        text = str(value).strip()
        try:
            hour = datetime.fromisoformat(text)
        except ValueError:
            self.fail(f"{value!r} is not a date or time; {_HOUR_EXAMPLE}", param, ctx)
        if hour.tzinfo is None and len(text) <= len("2026-01-31"):
            hour = hour.replace(tzinfo=UTC)
        if hour.tzinfo is None:
            self.fail(f"{value!r} has no time zone; {_HOUR_EXAMPLE}", param, ctx)
        hour = hour.astimezone(UTC)
        if hour.minute or hour.second or hour.microsecond:
            self.fail(f"{value!r} is not a full hour; {_HOUR_EXAMPLE}", param, ctx)
        return hour


def resolve_period(
    start: datetime | None, end: datetime | None, now: datetime, default: timedelta = DEFAULT_PERIOD
) -> tuple[datetime, datetime]:
    """Fill in the missing ends of a period; the default end includes the current hour."""
    this_hour = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    end = end or min(this_hour + _HOUR, (start or this_hour) + MAX_PERIOD)
    start = start or end - default
    if start >= end:
        raise click.UsageError(
            f"the period ends at {_format_utc(end)}, before it starts at {_format_utc(start)}"
        )
    if end - start > MAX_PERIOD:
        days = (end - start) / timedelta(days=1)
        raise click.UsageError(
            f"the period from {_format_utc(start)} to {_format_utc(end)} has {days:.4g} days; the "
            "maximum is 14"
        )
    return start, end


def _format_utc(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")
