"""Questions to a person; no answer means no."""

from __future__ import annotations

import sys

import click


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
