"""Numbers, times and sizes as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tinkex import clock
from tinkex.units import format_bytes
from tinkex.units import format_count as format_count

if TYPE_CHECKING:
    from tinkex.cli.context import Screen

UNKNOWN = "N/A"
#: Words of keys that are not written with one capital.
_SPELLINGS = {"id": "ID", "url": "URL", "pid": "PID", "lora": "LoRA"}
_SPELLINGS |= {name: name for name in ("float32", "bfloat16")}
_TIME_UNITS = (("week", 604800), ("day", 86400), ("hour", 3600), ("minute", 60))
#: A time further away than this is told by its date.
_RELATIVE_SECONDS = 30 * 86400


def format_size(num_bytes: float | None) -> str:
    """A number of bytes: 512 B, 1.5 kB, 184 MB."""
    if num_bytes is None or not math.isfinite(num_bytes) or num_bytes < 0:
        return UNKNOWN
    return format_bytes(num_bytes)


def format_timestamp(when: datetime | str | None, now: datetime | None = None) -> str:
    """A time from now: 2 hours ago, in 3 days; a date if it is more than a month away."""
    if when is None or when == "":
        return UNKNOWN
    try:
        then = datetime.fromisoformat(when) if isinstance(when, str) else when
    except ValueError:
        return str(when)
    then = then if then.tzinfo is not None else then.replace(tzinfo=UTC)
    seconds = ((now or clock.utc_now()) - then).total_seconds()
    if abs(seconds) >= _RELATIVE_SECONDS:
        return then.astimezone(UTC).date().isoformat()
    return _format_relative(seconds)


def _format_relative(seconds: float) -> str:
    if seconds <= -60:
        # What ends in a day is not said to end in 23 hours a moment later.
        seconds = math.floor(seconds / 60) * 60
    for name, length in _TIME_UNITS:
        count = int(abs(seconds) // length)
        if count:
            span = format_count(count, name)
            return f"{span} ago" if seconds > 0 else f"in {span}"
    return "just now" if seconds >= 0 else "in less than a minute"


def format_duration(seconds: float | None) -> str:
    """A length of time: 29ms, 0.4s, 12s, 3m 05s, 2h 10m, 4d 02h."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return UNKNOWN
    if seconds < 10:
        return f"{1000 * seconds:.0f}ms" if seconds < 0.1 else f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02}h"


def format_bool(value: bool) -> str:
    """Yes or No."""
    return "Yes" if value else "No"


def format_optional(value: Any, formatter: Callable[[Any], str] = str) -> str:
    """A value that may be missing."""
    return UNKNOWN if value is None else formatter(value)


def truncate_cells(text: str, max_cells: int) -> str:
    """A text in at most so many cells of a terminal; an ellipsis stands for what is cut."""
    if text.isascii() and len(text) <= max_cells:
        return text
    from rich.text import Text

    cut = Text(escape_line(text))
    cut.truncate(max_cells, overflow="ellipsis")
    return cut.plain


def property_label(key: str) -> str:
    """A key of JSON as tables spell it: started_at is Started At, url is URL."""
    words = key.replace("_", " ").split(" ")
    return " ".join(_SPELLINGS.get(word) or word[:1].upper() + word[1:] for word in words)


def escape_line(text: object) -> str:
    """A text on one line, without anything that could move a cursor or change a colour."""
    return "".join(letter if letter.isprintable() else _escape_char(letter) for letter in str(text))


def wrap_text(text: str, screen: Screen) -> str:
    """Lines no longer than a person's terminal is wide; a terminal itself would break words."""
    if not screen.is_terminal or screen.width is None:
        return text
    import textwrap

    cut = textwrap.TextWrapper(
        width=screen.width, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return "\n".join(
        "\n".join(cut.wrap(line)) if len(line) > screen.width else line for line in text.split("\n")
    )


def _escape_char(letter: str) -> str:
    return " " if letter in "\n\r\t" else f"\\x{ord(letter):02x}"
