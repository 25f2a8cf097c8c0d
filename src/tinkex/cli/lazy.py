"""A group of commands, each imported when it is used; help needs none of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import click


class Entry(NamedTuple):
    """Where a command lives, and its line in the help."""

    home: str
    """Its module and name, as `package.module:name`."""
    summary: str


class LazyGroup(click.Group):
    """A group whose commands are known by name until one is called."""

    def __init__(self, *args: Any, entries: Mapping[str, Entry] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._entries = dict(entries or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the alphabet."""
        return sorted({*super().list_commands(ctx), *self._entries})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by name, imported now if it was not."""
        entry = self._entries.get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = entry.home.partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, from their summaries alone."""
        rows = [(name, self._summary(ctx, name)) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def _summary(self, ctx: click.Context, name: str) -> str:
        entry = self._entries.get(name)
        if entry is not None:
            return entry.summary
        command = super().get_command(ctx, name)
        return command.get_short_help_str() if command is not None else ""
