"""Confirmation prompts, and checks of output paths before any work is done."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import click

from tinkex.cli.context import Context
from tinkex.cli.errors import FAILED, CliError
from tinkex.cli.options import F
from tinkex.cli.output import PropertiesOutput


def confirm(question: str, about: str = "") -> bool:
    """Ask a yes/no question on stderr after printing `about`; only y or yes confirms."""
    if about:
        click.echo(about, err=True)
    click.echo(f"{question} [y/N] ", err=True, nl=False)
    answer = _read_line()
    if not _is_stdin_terminal() or not answer.endswith("\n"):
        # Only Enter on a terminal ends the prompt's line.
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
        # stdin is closed or cannot be read.
        return ""


def _is_stdin_terminal() -> bool:
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except ValueError:
        # The file is closed.
        return False


def yes_option() -> Callable[[F], F]:
    """Create `--yes`, which skips the confirmation."""
    return click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")


def exit_cancelled(context: Context, data: Mapping[str, object]) -> NoReturn:
    """Exit a command whose confirmation was declined."""
    if context.is_json:
        PropertiesOutput({**data, "cancelled": True}).print("json")
    click.get_current_context().exit(FAILED)


def resolve_output_file(path: Path) -> Path:
    """Resolve the path of an output file; raise CliError if it cannot be written."""
    final = path.resolve()
    if final.exists() and not final.is_file():
        raise CliError(
            f"--output must be a file, but {path} is not one", "Choose another --output."
        )
    _check_writable(path, final.parent, "Choose another --output.")
    return final


def check_run_directory(path: Path) -> None:
    """Raise CliError if a run directory cannot be created or written."""
    _check_writable(path, path.absolute(), "Choose another with --run-dir.")


def _check_writable(path: Path, directory: Path, hint: str) -> None:
    """Raise CliError if a directory cannot be written, nor created in an existing parent."""
    nearest = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise CliError(
            f"{path} cannot be written: {nearest} is not a directory that this user can write to",
            hint,
        )


PLOT_SUFFIXES = (".png", ".svg", ".csv")


def plot_output_option() -> Callable[[F], F]:
    """Create `--output` of plot commands, which checks the suffix of the file."""
    return click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        callback=_check_plot_suffix,
        help="Write an image (.png, .svg) or all values (.csv) instead of a chart in the terminal.",
    )


def _check_plot_suffix(
    ctx: click.Context, param: click.Parameter, value: Path | None
) -> Path | None:
    if value is not None and value.suffix.lower() not in PLOT_SUFFIXES:
        raise click.BadParameter(f"{value} must end in .png, .svg or .csv.")
    return value
