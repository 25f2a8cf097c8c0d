"""What to type next: commands that work as they are printed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import click

from tinkex.cli.context import Context

CommandWords = Sequence[str]


def build_command_line(context: Context, *words: str) -> list[str]:
    """A command of ours that uses the server which this one used."""
    given = (("--base-url", context.base_url), ("--profile", context.profile))
    options = [word for flag, value in given if value for word in (flag, value)]
    return ["tinkex", *words, *options]


def suggest_commands(context: Context, commands: Sequence[CommandWords]) -> None:
    """Print commands on stderr, each on one line so that it can be copied; programs get none."""
    if commands and not context.is_json:
        click.echo("Next:", err=True)
        for words in commands:
            click.echo(f"  {shlex.join(words)}", err=True)
