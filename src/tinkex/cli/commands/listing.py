"""Options that lists share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click


class ColumnNames(click.ParamType[tuple[str, ...]]):
    """Names of columns with commas between them."""

    name = "columns"

    def __init__(self, summaries: Mapping[str, str]) -> None:
        self._summaries = summaries

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The names, each one known."""
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
        unknown = [name for name in names if name not in self._summaries]
        if unknown or not names:
            known = ", ".join(self._summaries)
            self.fail(
                f"{', '.join(unknown) or value!r} is no column; there is: {known}", param, ctx
            )
        return names


def columns_option(summaries: Mapping[str, str]) -> Callable[..., Any]:
    """`-c`: which columns a table shows; `summaries` names all that there are."""
    known = "; ".join(f"{name}: {text}" for name, text in summaries.items())
    return click.option(
        "-c",
        "--columns",
        type=ColumnNames(summaries),
        metavar="NAMES",
        help=f"The columns of the table, with commas between them. {known}.",
    )


def limit_option(default: int | None = 20, help: str = "") -> Callable[..., Any]:
    """`--limit`: how many items a list has at most."""
    return click.option(
        "--limit",
        type=click.IntRange(min=0),
        default=default,
        show_default=default is not None,
        metavar="N",
        help=help or "How many to show at most; 0 shows all.",
    )
