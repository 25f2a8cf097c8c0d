"""Lifetimes and dates as they are written on a command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import click

from tinkex.errors import InvalidInput
from tinkex.lifetimes import check_ttl

_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_LIFETIME = re.compile(r"(\d{1,12})\s*([smhdw]?)", re.ASCII)


class Lifetime(click.ParamType[int]):
    """How long a checkpoint lives, such as 7d, 12h or 2w; a bare number is in seconds."""

    name = "lifetime"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The seconds."""
        if isinstance(value, int):
            return value
        found = _LIFETIME.fullmatch(value.strip())
        seconds = int(found[1]) * _UNIT_SECONDS[found[2]] if found else 0
        try:
            return check_ttl(seconds)
        except InvalidInput:
            self.fail(
                f"{value!r} is not a lifetime; write it as 7d, 12h, 90m or in seconds, at most 10 "
                "years",
                *(param, ctx),
            )


class IsoDateTime(click.ParamType[datetime]):
    """A date or a time in ISO 8601; without an offset it is in UTC."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The moment, with its offset; a date is its midnight."""
        if isinstance(value, datetime):
            return value
        try:
            return to_utc(datetime.fromisoformat(value.strip()))
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is no date; write it as 2026-01-31 or 2026-01-31T08:00:00Z", param, ctx
            )


def to_utc(moment: datetime) -> datetime:
    """A moment that can be compared with any other."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
