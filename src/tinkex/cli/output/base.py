"""Base classes of command output: JSON for programs, tables for people."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from enum import Enum

import click

from tinkex.cli.context import Context, Format, Screen
from tinkex.cli.format import Column as Column
from tinkex.cli.format import format_count, property_label, wrap_text


class Output(ABC):
    """A result that prints itself in either format."""

    @abstractmethod
    def to_dict(self) -> object:
        """Return the result as JSON data, nearly always a dict."""

    @abstractmethod
    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""

    @abstractmethod
    def rows(self) -> Sequence[Sequence[str]]:
        """Return the rows of the table."""

    def title(self) -> str | None:
        """Return the line above the table."""
        return None

    def print(self, format: Format = "table", screen: Screen | None = None) -> None:
        """Write the result to stdout."""
        if format == "json":
            click.echo(to_json(self.to_dict(), is_ascii=not can_print_unicode()))
            return
        from tinkex.cli.output.tables import print_table

        print_table(self.columns(), self.rows(), self.title(), screen or Screen())


class PropertiesOutput(Output):
    """Properties of one object, one per line."""

    def __init__(
        self,
        data: Mapping[str, object],
        rows: Sequence[tuple[str, str]] | None = None,
        title: str | None = None,
    ) -> None:
        """`rows` are the formatted properties; by default they are derived from `data`."""
        self._data = dict(data)
        known = ((key, value) for key, value in self._data.items() if value is not None)
        self._rows = (
            rows
            if rows is not None
            else [(property_label(key), str(value)) for key, value in known]
        )
        self._title = title

    def to_dict(self) -> dict[str, object]:
        """The data."""
        return self._data

    def columns(self) -> Sequence[Column]:
        """Property and value."""
        return (Column("Property"), Column("Value"))

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per property."""
        return self._rows

    def title(self) -> str | None:
        """Return the line above the table."""
        return self._title

    def print(self, format: Format = "table", screen: Screen | None = None) -> None:
        """Write the properties to stdout."""
        if format == "json":
            super().print(format, screen)
            return
        from tinkex.cli.output.tables import print_properties

        print_properties(self.rows(), self.title(), screen or Screen())


class TableOutput(Output):
    """A plain list: some keys of each row are columns, JSON contains all of them."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, object]],
        columns: Mapping[str, Column],
        title: str | None = None,
        data: object = None,
    ) -> None:
        """`data` is the JSON output; by default the rows."""
        self._rows = rows
        self._columns = columns
        self._title = title
        self._data = list(rows) if data is None else data

    def to_dict(self) -> object:
        """The data."""
        return self._data

    def columns(self) -> Sequence[Column]:
        """The columns."""
        return tuple(self._columns.values())

    def rows(self) -> Sequence[Sequence[str]]:
        """Return the rows; unknown values are empty."""
        cells = [[row.get(key) for key in self._columns] for row in self._rows]
        return [["" if cell is None else str(cell) for cell in row] for row in cells]

    def title(self) -> str | None:
        """Return the line above the table."""
        return self._title


def show(context: Context, result: Output) -> None:
    """Print a result in the context's format."""
    result.print(context.format, context.stdout)


def announce(context: Context, sentence: str, data: Mapping[str, object]) -> None:
    """Report a completed action: a sentence on stderr, or `data` as JSON on stdout."""
    if context.is_json:
        PropertiesOutput(data).print("json")
    else:
        click.echo(wrap_text(sentence, context.stderr), err=True)


def list_title(num_shown: int, num_hidden: int, noun: str, about: str = "") -> str:
    """Format the title of a list with the number of shown and hidden items."""
    if not num_shown:
        return f"No {noun}s found{about}"
    more = f" ({num_hidden:,} more not shown, use --limit to see more)" if num_hidden else ""
    return f"{format_count(num_shown, noun)}{about}{more}"


def can_print_unicode() -> bool:
    """Whether stdout can encode any character."""
    return "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()


def to_json(value: object, *, is_ascii: bool = False) -> str:
    """Serialize a value as indented JSON."""
    import json

    return json.dumps(to_jsonable(value), indent=2, ensure_ascii=is_ascii, allow_nan=False)


def to_jsonable(value: object) -> object:
    """Convert a value to JSON types."""
    if isinstance(value, Enum):
        return to_jsonable(value.value)
    if value is None or isinstance(value, str | int | float):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in value]
    return _object_to_jsonable(value)


def _object_to_jsonable(value: object) -> object:
    from pathlib import PurePath

    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, PurePath):
        return str(value)
    for name in ("model_dump", "to_dict", "tolist"):
        if hasattr(value, name):
            return to_jsonable(getattr(value, name)())
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")


CommandWords = Sequence[str]


def build_command_line(context: Context, *words: str) -> list[str]:
    """Build a tinkex command with the server options of this one."""
    given = (("--base-url", context.base_url), ("--profile", context.profile))
    options = [word for flag, value in given if value for word in (flag, value)]
    return ["tinkex", *words, *options]


def suggest_commands(context: Context, commands: Sequence[CommandWords]) -> None:
    """Print follow-up commands on stderr, one per line; nothing with JSON output."""
    if commands and not context.is_json:
        import shlex

        click.echo("Next:", err=True)
        for words in commands:
            click.echo(f"  {shlex.join(words)}", err=True)
