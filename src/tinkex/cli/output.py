"""What commands print: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click


def emit(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], *, as_json: bool) -> None:
    """Print rows; `columns` names what a table shows, by key and heading."""
    if as_json:
        emit_json(list(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in columns.values():
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*[_shown(row.get(key)) for key in columns])
    Console(soft_wrap=False, highlight=False, markup=False).print(table)


def emit_facts(facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one thing: a line per fact that is known."""
    if as_json:
        emit_json(dict(facts))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            table.add_row(name, str(value))
    Console(highlight=False, markup=False).print(table)


def emit_json(value: Any) -> None:
    """Print a value for programs."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _shown(value: Any) -> str:
    return "" if value is None else str(value)
