"""Print tables with rich; on a narrow terminal, print blocks of lines instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from tinkex.cli.context import Screen
from tinkex.cli.format import (
    UNBROKEN_CELL_WIDTH,
    Column,
    escape_line,
    fit_columns,
    table_width,
    wrap_text,
)

#: Wider than any row, for pipes and files.
_UNLIMITED_WIDTH = 100_000
#: Minimum width of the value column; on narrower screens properties are printed as lines.
_MIN_VALUE_WIDTH = 20


def make_console(screen: Screen) -> Console:
    """Create a console for stdout with the properties of the screen."""
    return Console(
        file=sys.stdout,
        width=screen.width or _UNLIMITED_WIDTH,
        force_terminal=screen.is_terminal and screen.is_colored,
        no_color=not screen.is_colored,
        color_system="auto" if screen.is_colored else None,
        emoji=False,
        markup=False,
        highlight=False,
    )


def print_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str | None, screen: Screen
) -> None:
    """Print a table; if it does not fit, print a block of lines per row."""
    console = make_console(screen)
    cells = [[escape_line(cell) for cell in row] for row in rows]
    if not cells:
        _print_line(console, Text(title or "Nothing found"))
        return
    widths = [
        max(cell_len(column.heading), *(cell_len(row[i]) for row in cells))
        for i, column in enumerate(columns)
    ]
    _print_title(console, title, screen)
    layout = fit_columns(widths, [column.rank for column in columns], screen.width)
    headings = [column.heading for column in columns]
    if not layout.is_table:
        _print_blocks(console, headings, cells)
        return
    table = Table(header_style="bold")
    for i in layout.visible_columns:
        style = "bold cyan" if i == layout.visible_columns[0] else None
        is_short = widths[i] <= UNBROKEN_CELL_WIDTH
        justify: JustifyMethod = "right" if columns[i].is_number else "left"
        table.add_column(
            headings[i], style=style, justify=justify, overflow="fold", no_wrap=is_short
        )
    for row in cells:
        table.add_row(*(Text(row[i]) for i in layout.visible_columns))
    console.print(table)


def print_properties(rows: Sequence[Sequence[str]], title: str | None, screen: Screen) -> None:
    """Print a table of properties; on a narrow screen, a line for each."""
    console = make_console(screen)
    cells = [(escape_line(name), escape_line(value)) for name, value in rows]
    names = max((cell_len(name) for name, _ in cells), default=0)
    _print_title(console, title, screen)
    if screen.width is not None and table_width([names, _MIN_VALUE_WIDTH]) > screen.width:
        for name, value in cells:
            _print_line(console, Text.assemble((f"{name}: ", "bold"), value))
        return
    table = Table(header_style="bold")
    table.add_column("Property", style="bold", no_wrap=True)
    table.add_column("Value", overflow="fold")
    for name, value in cells:
        table.add_row(Text(name), Text(value))
    console.print(table)


def _print_title(console: Console, title: str | None, screen: Screen) -> None:
    # rich would wrap a table title to the table's width and pad it with spaces.
    if title:
        _print_line(console, Text(wrap_text(escape_line(title), screen), style="bold"))


def _print_blocks(
    console: Console, headings: Sequence[str], cells: Sequence[Sequence[str]]
) -> None:
    for row in cells:
        _print_line(console, Text(row[0], style="bold cyan"))
        for heading, cell in zip(headings[1:], row[1:], strict=True):
            _print_line(console, Text(f"  {heading}: {cell}"))


def _print_line(console: Console, text: Text) -> None:
    # Let the terminal wrap long lines, so that a long id can be copied in one piece.
    console.print(text, soft_wrap=True)
