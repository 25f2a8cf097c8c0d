"""Which columns of a table fit on a screen; whole numbers in, a decision out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: A border and a space on either side of each column, and the last border.
_COLUMN_BORDER, _LAST_BORDER = 3, 1
#: A cell that is not longer than this is never broken.
UNBROKEN_CELL_WIDTH = 18


class Column(NamedTuple):
    """A column of a table."""

    heading: str
    rank: int = 0
    """0 is always shown; of the others the highest goes first when the screen is narrow."""
    is_number: bool = False
    """Numbers are aligned at their last digit."""


class ListLayout(NamedTuple):
    """How a list is shown."""

    visible_columns: tuple[int, ...]
    """The columns that are shown, by number."""
    is_table: bool
    """Whether there is room for a table; else each item is a block of lines."""


def min_column_width(width: int) -> int:
    """How narrow a column may get: long ids and paths may be broken once."""
    return width if width <= UNBROKEN_CELL_WIDTH else max(UNBROKEN_CELL_WIDTH, -(-width // 2))


def table_width(widths: Sequence[int]) -> int:
    """How wide a table with columns of these widths is."""
    return sum(width + _COLUMN_BORDER for width in widths) + _LAST_BORDER


def fit_columns(
    widths: Sequence[int], ranks: Sequence[int], screen_width: int | None
) -> ListLayout:
    """Drop columns by rank until the rest fits; if nothing helps, show all of them as blocks."""
    kept = list(range(len(widths)))
    while screen_width is not None:
        if table_width([min_column_width(widths[i]) for i in kept]) <= screen_width:
            break
        worst = max(kept, key=lambda i: (ranks[i], i))
        if ranks[worst] == 0 or len(kept) == 1:
            return ListLayout(tuple(range(len(widths))), is_table=False)
        kept.remove(worst)
    return ListLayout(tuple(kept), is_table=True)
