"""Questions to a person; no answer means no."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from tinkex.cli.context import Context
from tinkex.cli.errors import FAILED, CliError
from tinkex.cli.output import PropertiesOutput


def confirm(question: str, about: str = "") -> bool:
    """Ask on stderr, with what it is about; only y or yes is a yes, and a closed stdin is a no."""
    if about:
        click.echo(about, err=True)
    click.echo(f"{question} [y/N] ", err=True, nl=False)
    answer = _read_line()
    if not _is_stdin_terminal() or not answer.endswith("\n"):
        # Only what a person types ends the line of the question by itself.
        click.echo("", err=True)
    if answer.strip().lower() in {"y", "yes"}:
        return True
    click.echo("Cancelled.", err=True)
    return False


def _read_line() -> str:
    if sys.stdin is None:
        return ""
    try:
        return sys.stdin.readline()
    except (ValueError, OSError, EOFError):
        # A stdin that is closed or cannot be read gives no answer.
        return ""


def _is_stdin_terminal() -> bool:
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except ValueError:
        # A closed file is nobody's terminal.
        return False


def yes_option() -> Callable[..., Any]:
    """`-y`: ask nothing."""
    return click.option("-y", "--yes", is_flag=True, help="Do it without asking.")


def exit_cancelled(context: Context, data: Mapping[str, Any]) -> NoReturn:
    """End a command whose question was answered with no: nothing was done."""
    if context.is_json:
        PropertiesOutput({**data, "cancelled": True}).print("json")
    click.get_current_context().exit(FAILED)


def resolve_output_file(path: Path) -> Path:
    """Where to write, links followed; refused here if that cannot work, before any work."""
    final = path.resolve()
    if final.exists() and not final.is_file():
        raise CliError(f"--output must be a file, and {path} is none", "Name another.")
    _check_writable(path, final.parent, "Name another --output.")
    return final


def check_run_directory(path: Path) -> None:
    """Refuse a directory that cannot be made or written, before any work is done for it."""
    _check_writable(path, path.absolute(), "Name another with --run-dir.")


def _check_writable(path: Path, directory: Path, hint: str) -> None:
    """Refuse a directory that cannot be written, nor made below one that can."""
    nearest = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise CliError(
            f"{path} cannot be written: {nearest} is not a directory that this user can write to",
            hint,
        )
