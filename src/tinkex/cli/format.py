"""Format numbers, times, sizes and table layouts for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tinkex import clock
from tinkex.display import format_bytes
from tinkex.display import format_count as format_count

if TYPE_CHECKING:
    from tinkex.cli.context import Screen

T = TypeVar("T")

UNKNOWN = "N/A"
#: Words of keys that are not capitalized in the usual way.
_SPELLINGS = {"id": "ID", "url": "URL", "pid": "PID", "lora": "LoRA"}
_SPELLINGS |= {name: name for name in ("float32", "bfloat16")}
_TIME_UNITS = (("week", 604800), ("day", 86400), ("hour", 3600), ("minute", 60))
#: Times further away than this are shown as a date.
_RELATIVE_SECONDS = 30 * 86400


def format_size(num_bytes: float | None) -> str:
    """Format a number of bytes: 512 B, 1.5 kB, 184 MB."""
    if num_bytes is None or not math.isfinite(num_bytes) or num_bytes < 0:
        return UNKNOWN
    return format_bytes(num_bytes)


def format_timestamp(when: datetime | str | None, now: datetime | None = None) -> str:
    """Format a time relative to now: 2 hours ago, in 3 days; a date if over a month away."""
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
        # Round up, so that a TTL of one day does not show as 23 hours a moment later.
        seconds = math.floor(seconds / 60) * 60
    for name, length in _TIME_UNITS:
        count = int(abs(seconds) // length)
        if count:
            span = format_count(count, name)
            return f"{span} ago" if seconds > 0 else f"in {span}"
    return "just now" if seconds >= 0 else "in less than a minute"


def format_duration(seconds: float | None) -> str:
    """Format a duration: 29ms, 0.4s, 12s, 3m 05s, 2h 10m, 4d 02h."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return UNKNOWN
    if seconds < 10:
        return f"{1000 * seconds:.0f}ms" if seconds < 0.1 else f"{seconds:.1f}s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m {rounded % 60:02}s"
    if rounded < 86400:
        return f"{rounded // 3600}h {rounded % 3600 // 60:02}m"
    return f"{rounded // 86400}d {rounded % 86400 // 3600:02}h"


def format_bool(value: bool) -> str:
    """Format a bool as Yes or No."""
    return "Yes" if value else "No"


def format_optional(value: T | None, formatter: Callable[[T], str] = str) -> str:
    """Format a value that may be None."""
    return UNKNOWN if value is None else formatter(value)


def truncate_cells(text: str, max_cells: int) -> str:
    """Shorten a text to `max_cells` terminal cells, with an ellipsis at the cut."""
    if text.isascii() and len(text) <= max_cells:
        return text
    from rich.text import Text

    cut = Text(escape_line(text))
    cut.truncate(max_cells, overflow="ellipsis")
    return cut.plain


def property_label(key: str) -> str:
    """Convert a JSON key to a table label: started_at to Started At, url to URL."""
    words = key.replace("_", " ").split(" ")
    return " ".join(_SPELLINGS.get(word) or word[:1].upper() + word[1:] for word in words)


def escape_line(text: object) -> str:
    """Put a text on one line and escape control characters."""
    return "".join(char if char.isprintable() else _escape_char(char) for char in str(text))


def wrap_text(text: str, screen: Screen) -> str:
    """Wrap lines between words to the width of a terminal."""
    if not screen.is_terminal or screen.width is None:
        return text
    import textwrap

    wrapper = textwrap.TextWrapper(
        width=screen.width, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return "\n".join(
        "\n".join(wrapper.wrap(line)) if len(line) > screen.width else line
        for line in text.split("\n")
    )


def _escape_char(char: str) -> str:
    return " " if char in "\n\r\t" else f"\\x{ord(char):02x}"


#: Width of a column's border and padding, and of the last border.
_COLUMN_BORDER, _LAST_BORDER = 3, 1
#: Cells up to this width are never wrapped.
UNBROKEN_CELL_WIDTH = 18


class Column(NamedTuple):
    """A column of a table."""

    heading: str
    rank: int = 0
    """0: always shown. On a narrow screen, columns with the highest rank are dropped first."""
    is_number: bool = False
    """Whether the column is right-aligned."""


class ListLayout(NamedTuple):
    """Layout of a list on a screen."""

    visible_columns: tuple[int, ...]
    """Indices of the columns that are shown."""
    is_table: bool
    """Whether a table fits; otherwise each item is printed as a block of lines."""


def min_column_width(width: int) -> int:
    """Return the minimum width of a column: long ids and paths may be wrapped once."""
    return width if width <= UNBROKEN_CELL_WIDTH else max(UNBROKEN_CELL_WIDTH, -(-width // 2))


def table_width(widths: Sequence[int]) -> int:
    """Return the width of a table with columns of these widths."""
    return sum(width + _COLUMN_BORDER for width in widths) + _LAST_BORDER


def fit_columns(
    widths: Sequence[int], ranks: Sequence[int], screen_width: int | None
) -> ListLayout:
    """Drop columns by rank until the table fits; if it never does, use blocks."""
    visible = list(range(len(widths)))
    while screen_width is not None:
        if table_width([min_column_width(widths[i]) for i in visible]) <= screen_width:
            break
        worst = max(visible, key=lambda i: (ranks[i], i))
        if ranks[worst] == 0 or len(visible) == 1:
            return ListLayout(tuple(range(len(widths))), is_table=False)
        visible.remove(worst)
    return ListLayout(tuple(visible), is_table=True)
