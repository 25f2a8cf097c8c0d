"""Global options and the Command and Group classes that accept them at any position.

If a global option is given more than once, the last one wins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

Format = Literal["table", "json"]

if TYPE_CHECKING:
    from typing import TypedDict

    class OutputFlags(TypedDict, total=False):
        """Fields of the Context that select the output."""

        format: Format
        verbose: bool


F = TypeVar("F", bound=Callable[..., object])
#: Key in click's `ctx.meta` for the global options that were given.
GIVEN_OPTIONS_KEY = "tinkex.cli.given"
_GLOBAL_OPTIONS = "Global options"
#: Longer than any summary, so that click does not truncate them.
_MAX_SUMMARY_CHARS = 10_000
_ARGUMENTS, _OPTIONS = "Arguments", "Options"
_UNIT_SECONDS = {"": 0.001, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)")


class Duration(click.ParamType[float]):
    """A duration such as 30s, 500ms or 2m, in seconds; a bare number is in milliseconds."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse the duration into seconds."""
        if isinstance(value, int | float):
            return float(value)
        match = _DURATION.fullmatch(str(value).strip())
        seconds = float(match[1]) * _UNIT_SECONDS[match[2]] if match else 0.0
        if not 0.0 < seconds < 1e9:
            self.fail(f"{value!r} is not a duration; write it as 30s, 500ms or 2m", param, ctx)
        return seconds


class KeyValuePair(click.ParamType[tuple[str, str]]):
    """A KEY=VALUE pair."""

    name = "pair"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Split the pair."""
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is not a KEY=VALUE pair", param, ctx)
        return key, text


class Argument(click.Argument):
    """An argument with a help text: `@click.argument("path", cls=Argument, summary=...)`."""

    def __init__(self, *args: Any, summary: str, **kwargs: Any) -> None:
        self.summary = summary
        super().__init__(*args, **kwargs)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the name and the help text."""
        return self.make_metavar(ctx), self.summary


class GlobalOption(click.Option):
    """An option that is stored in the Context instead of passed to the command."""

    def __init__(
        self, flags: Sequence[str], field: str, value: object = None, **kwargs: Any
    ) -> None:
        """Create the option; `value` is stored when it is a flag."""
        self.field = field
        self.value = value
        self.flags = tuple(flags)
        self.settings = kwargs
        super().__init__(
            [*flags, f"global_{field}_{flags[-1].strip('-')}".replace("-", "_")],
            expose_value=False,
            callback=_store_option,
            **kwargs,
        )

    def without_flags(self, taken: set[str]) -> GlobalOption | None:
        """Return the option without the flags a command uses itself, or None if none remain."""
        left = [flag for flag in self.flags if flag not in taken]
        if len(left) == len(self.flags):
            return self
        return GlobalOption(left, self.field, self.value, **self.settings) if left else None


def _store_option(ctx: click.Context, param: click.Parameter, value: object) -> None:
    assert isinstance(param, GlobalOption)
    if ctx.get_parameter_source(param.name or "") is not click.core.ParameterSource.COMMANDLINE:
        return
    given: dict[str, object] = ctx.meta.setdefault(GIVEN_OPTIONS_KEY, {})
    given[param.field] = param.value if param.is_flag else value


@cache
def global_options() -> tuple[GlobalOption, ...]:
    """Return all global options, in the order of the help."""
    formats = click.Choice(["table", "json"])
    return (
        GlobalOption(
            ["-f", "--format"], "format", type=formats, help="Output format of the result."
        ),
        GlobalOption(["--json"], "format", "json", is_flag=True, help="Same as -f json."),
        GlobalOption(
            ["-v", "--verbose"], "verbose", True, is_flag=True, help="Print the log and tracebacks."
        ),
        GlobalOption(["--api-key"], "api_key", metavar="KEY", help="API key to send."),
        GlobalOption(["--base-url"], "base_url", metavar="URL", help="Server to use."),
        GlobalOption(
            ["--profile"],
            "profile",
            metavar="NAME",
            help="Profile in config.toml with server and key.",
        ),
        GlobalOption(
            ["--timeout"],
            "timeout_seconds",
            type=Duration(),
            metavar="TIME",
            help="Timeout of one request: 30s, 2m; a bare number is milliseconds.",
        ),
    )


def global_flags() -> Mapping[str, bool]:
    """Map every global flag to whether it takes a value."""
    return {flag: not option.is_flag for option in global_options() for flag in option.flags}


class _GlobalOptionsMixin(click.Command):
    """Adds the global options to a command; the command's own options take precedence."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own parameters, then the global options."""
        own = super().get_params(ctx)
        taken = {flag for param in own for flag in (*param.opts, *param.secondary_opts)}
        left = (option.without_flags(taken) for option in global_options())
        return [*own, *(option for option in left if option is not None)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments, own options, subcommands if any, then the global options."""
        sections: dict[str, list[tuple[str, str]]] = {
            _ARGUMENTS: [],
            _OPTIONS: [],
            _GLOBAL_OPTIONS: [],
        }
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            # An argument without a help text appears only in the usage line.
            if row is not None and (row[1] or not isinstance(param, click.Argument)):
                sections[_help_section(param)].append(row)
        for heading in (_ARGUMENTS, _OPTIONS):
            _write_help_rows(formatter, heading, sections[heading])
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)
        _write_help_rows(formatter, _GLOBAL_OPTIONS, sections[_GLOBAL_OPTIONS])


def _help_section(param: click.Parameter) -> str:
    if isinstance(param, GlobalOption):
        return _GLOBAL_OPTIONS
    return _ARGUMENTS if isinstance(param, click.Argument) else _OPTIONS


def _write_help_rows(
    formatter: click.HelpFormatter, heading: str, rows: Sequence[tuple[str, str]]
) -> None:
    if rows:
        with formatter.section(heading):
            formatter.write_dl(rows)


def command_summary(command: click.Command) -> str:
    """Return the first sentence of a command's help, not truncated."""
    return command.get_short_help_str(limit=_MAX_SUMMARY_CHARS)


class Command(_GlobalOptionsMixin):
    """A command with global options."""


class Group(_GlobalOptionsMixin, click.Group):
    """A group with global options; so are its commands."""

    command_class = Command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write options and commands; click's version would list the commands twice."""
        _GlobalOptionsMixin.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands; click's version would truncate long summaries."""
        named = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, command_summary(command)) for name, command in named if command is not None]
        _write_help_rows(formatter, "Commands", rows)


Group.group_class = Group


def scan_output_flags(argv: Sequence[str]) -> OutputFlags:
    """Read format and verbosity from the arguments, even if they cannot be parsed."""
    flags: OutputFlags = {}
    formats: dict[str, Format] = {"table": "table", "json": "json"}
    words = list(argv[: argv.index("--")] if "--" in argv else argv)
    for word, after in zip(words, [*words, ""][1:], strict=True):
        if word == "--json":
            flags["format"] = "json"
        elif word in {"-v", "--verbose"}:
            flags["verbose"] = True
        elif word in {"-f", "--format"} and after in formats:
            flags["format"] = formats[after]
        else:
            value = word.removeprefix("--format=").removeprefix("-f")
            if value in formats and value != word:
                flags["format"] = formats[value]
    return flags


class ColumnNames(click.ParamType[tuple[str, ...]]):
    """Comma-separated column names."""

    name = "columns"

    def __init__(self, summaries: Mapping[str, str]) -> None:
        self._summaries = summaries

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Parse the names; fail on an unknown one."""
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(part.strip() for part in str(value).split(",") if part.strip()))
        unknown = [name for name in names if name not in self._summaries]
        if unknown or not names:
            known = ", ".join(self._summaries)
            self.fail(
                f"{', '.join(unknown) or value!r} is not a column; available: {known}", param, ctx
            )
        return names


def columns_option(summaries: Mapping[str, str]) -> Callable[[F], F]:
    """Create `--columns`; `summaries` maps all column names to their help."""
    known = "; ".join(f"{name}: {text}" for name, text in summaries.items())
    return click.option(
        "-c",
        "--columns",
        type=ColumnNames(summaries),
        metavar="NAMES",
        help=f"Columns of the table, comma-separated. {known}.",
    )


def limit_option(default: int | None = 20, help: str = "") -> Callable[[F], F]:
    """Create `--limit`, the maximum number of list items."""
    return click.option(
        "--limit",
        type=click.IntRange(min=0),
        default=default,
        show_default=default is not None,
        metavar="N",
        help=help or "Maximum number of items to show; 0 shows all.",
    )
