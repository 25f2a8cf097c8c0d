"""Groups of commands, each imported when it is used; help needs none of them."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tinkex.cli.options import GlobalOption, Group, command_summary, global_flags

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class LazyCommand(NamedTuple):
    """Where a command lives, and its line in the help."""

    import_path: str
    """Its module and name, as `package.module:name`."""
    summary: str


class LazyGroup(Group):
    """A group whose commands are known by name until one is called."""

    def __init__(self, *args: Any, entries: Mapping[str, LazyCommand] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._entries = dict(entries or {})

    @property
    def entries(self) -> dict[str, LazyCommand]:
        """What is known without an import."""
        return dict(self._entries)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the alphabet."""
        return sorted({*super().list_commands(ctx), *self._entries})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by name, imported now if it was not."""
        entry = self._entries.get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = entry.import_path.partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of a word; a misspelt one is told with what it may have meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            # The group's own version knows nothing of commands that are not imported yet.
            names = self.list_commands(ctx)
            raise click.NoSuchCommand(error.command_name, possibilities=names, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, from their summaries alone."""
        rows = [(name, self._command_summary(ctx, name)) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """What a word may become: commands by their summaries alone, then options."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        commands = [CompletionItem(name, help=self._command_summary(ctx, name)) for name in names]
        # Not the group's own version: it would import every command.
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def _command_summary(self, ctx: click.Context, name: str) -> str:
        entry = self._entries.get(name)
        if entry is not None:
            return entry.summary
        command = super().get_command(ctx, name)
        return command_summary(command) if command is not None else ""


class DefaultGroup(LazyGroup):
    """A group that means one of its commands when options come before any command's name.

    `run --prompt x` is `run sample --prompt x`; `run --help` is still about the group.
    """

    def __init__(self, *args: Any, default_command: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.default_command = default_command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options of the command that is meant without a name, then the commands."""
        command = self.get_command(ctx, self.default_command)
        assert command is not None  # it is one of the entries
        own = [param for param in command.params if not isinstance(param, GlobalOption)]
        rows = [row for param in own if (row := param.get_help_record(ctx)) is not None]
        with formatter.section(f"Options of `{self.default_command}`, also without its name"):
            formatter.write_dl(rows)
        super().format_commands(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the command's name where it was left out."""
        own = {*ctx.help_option_names, *self.list_commands(ctx)}
        place = first_argument_index(args)
        if place is not None and args[place] not in own and args[place].startswith("-"):
            args = [*args[:place], self.default_command, *args[place:]]
        return super().parse_args(ctx, args)


def first_argument_index(
    args: Sequence[str], flags: Mapping[str, bool] | None = None
) -> int | None:
    """Where the first word is that is no global option; None if there is none.

    `flags` are the global options and whether each takes a value.
    """
    known = global_flags() if flags is None else flags
    place = 0
    while place < len(args):
        name, has_value = _match_global_option(args[place], known)
        if name is None:
            return place
        place += 2 if known[name] and not has_value else 1
    return None


def _match_global_option(word: str, flags: Collection[str]) -> tuple[str | None, bool]:
    """The global option a word stands for, and whether its value is part of the word."""
    if word in flags:
        return word, False
    long, equals, _ = word.partition("=")
    if equals and long.startswith("--") and long in flags:
        return long, True
    short = word[:2]
    if not word.startswith("--") and short in flags:
        return short, True
    return None, False
