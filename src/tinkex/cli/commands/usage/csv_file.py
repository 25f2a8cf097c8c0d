"""Rows as CSV, on stdout or in a file that appears when it is complete."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tinkex.cli.context import Context

STDOUT_PATH = "-"


def check_csv_targets(context: Context, *places: str | None) -> None:
    """Refuse what would put two things on stdout."""
    named = places.count(STDOUT_PATH)
    if named > 1:
        raise click.UsageError("only one table fits on stdout; give one of them a file")
    if named and context.is_json:
        raise click.UsageError("CSV on stdout is no JSON; give it a file, or leave out -f json")


def write_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], place: str) -> None:
    """Write rows; columns that only some of them have come last."""
    extra = [key for row in rows for key in row if key not in columns]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*columns, *dict.fromkeys(extra)], restval="")
    writer.writeheader()
    writer.writerows(rows)
    if place == STDOUT_PATH:
        sys.stdout.write(text.getvalue())
        return
    path = Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.partial")
    try:
        scratch.write_text(text.getvalue(), encoding="utf-8", newline="")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
