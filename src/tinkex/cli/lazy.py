"""Command groups that import a command only when it runs; help needs no imports."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tinkex.cli.options import GlobalOption, Group, command_summary, global_flags

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class LazyCommand(NamedTuple):
    """Import path and help summary of a command."""

    import_path: str
    """Module and attribute, as `package.module:name`."""
    summary: str


class LazyGroup(Group):
    """A group whose commands are imported on first use."""

    def __init__(self, *args: Any, entries: Mapping[str, LazyCommand] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._entries = dict(entries or {})

    @property
    def entries(self) -> dict[str, LazyCommand]:
        """The commands that can be listed without importing them."""
        return dict(self._entries)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all command names, sorted."""
        return sorted({*super().list_commands(ctx), *self._entries})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by name, importing it if needed."""
        entry = self._entries.get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = entry.import_path.partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command; for an unknown name, suggest similar ones."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            # click suggests only commands that are already imported.
            names = self.list_commands(ctx)
            raise click.NoSuchCommand(error.command_name, possibilities=names, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from their summaries, without imports."""
        rows = [(name, self._command_summary(ctx, name)) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Complete commands from their summaries, without imports, then options."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        commands = [CompletionItem(name, help=self._command_summary(ctx, name)) for name in names]
        # click's Group version would import every command.
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def _command_summary(self, ctx: click.Context, name: str) -> str:
        entry = self._entries.get(name)
        if entry is not None:
            return entry.summary
        command = super().get_command(ctx, name)
        return command_summary(command) if command is not None else ""


class DefaultGroup(LazyGroup):
    """A group that runs a default command when options precede any command name.

    `run --prompt x` means `run sample --prompt x`; `run --help` prints the group's help.
    """

    def __init__(self, *args: Any, default_command: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.default_command = default_command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the default command, then the commands."""
        command = self.get_command(ctx, self.default_command)
        assert command is not None  # it is one of the entries
        own = [param for param in command.params if not isinstance(param, GlobalOption)]
        rows = [row for param in own if (row := param.get_help_record(ctx)) is not None]
        with formatter.section(f"Options of `{self.default_command}`, also without its name"):
            formatter.write_dl(rows)
        super().format_commands(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default command's name if it was omitted."""
        own = {*ctx.help_option_names, *self.list_commands(ctx)}
        index = first_argument_index(args)
        if index is not None and args[index] not in own and args[index].startswith("-"):
            args = [*args[:index], self.default_command, *args[index:]]
        return super().parse_args(ctx, args)


def first_argument_index(
    args: Sequence[str], flags: Mapping[str, bool] | None = None
) -> int | None:
    """Return the index of the first word that is not a global option, or None.

    `flags` maps each global flag to whether it takes a value.
    """
    known = global_flags() if flags is None else flags
    index = 0
    while index < len(args):
        name, has_value = _match_global_option(args[index], known)
        if name is None:
            return index
        index += 2 if known[name] and not has_value else 1
    return None


def _match_global_option(word: str, flags: Collection[str]) -> tuple[str | None, bool]:
    """Return the global option that a word matches, and whether the word contains its value."""
    if word in flags:
        return word, False
    long, equals, _ = word.partition("=")
    if equals and long.startswith("--") and long in flags:
        return long, True
    short = word[:2]
    if not word.startswith("--") and short in flags:
        return short, True
    return None, False
