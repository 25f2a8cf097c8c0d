"""Command context: the global options and the terminals of stdin, stdout and stderr."""

# No `from __future__ import annotations` here: NamedTuple compiles every string annotation, which
# takes 5% of the CLI's start-up time.

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TextIO, TypeVar

import click

from tinkex.cli.options import GIVEN_OPTIONS_KEY
from tinkex.cli.options import Format as Format

if TYPE_CHECKING:
    from tinkex.client.config import Config
    from tinkex.client.service import ServiceClient

T = TypeVar("T")
P = ParamSpec("P")


class Screen(NamedTuple):
    """Properties of an output stream."""

    is_terminal: bool = False
    """Whether the stream is a terminal."""
    is_colored: bool = False
    """Whether colors and links may be printed."""
    width: int | None = None
    """Maximum line width in columns; None is unlimited."""


class Context(NamedTuple):
    """Global options and streams, passed to every command; tests inject their own."""

    format: Format = "table"
    """Output format: table for people, json for programs."""
    verbose: bool = False
    """Print the log and tracebacks."""
    api_key: str | None = None
    base_url: str | None = None
    profile: str | None = None
    timeout_seconds: float | None = None
    """Timeout of one request; None uses the client's default."""
    stdout: Screen = Screen()
    stderr: Screen = Screen()
    is_stdin_terminal: bool = False
    """Whether the user can answer prompts."""
    make_service: "Callable[[Config], ServiceClient] | None" = None
    """Factory for the client; None creates a ServiceClient."""

    def __repr__(self) -> str:
        # Keep the key out of tracebacks and logs.
        return f"Context(format={self.format!r}, base_url={self.base_url!r})"

    @property
    def is_json(self) -> bool:
        """Whether the output format is JSON."""
        return self.format == "json"

    @classmethod
    def detect(cls) -> "Context":
        """Detect the context of this process from its standard streams."""
        return cls(
            stdout=_detect_screen(sys.stdout),
            stderr=_detect_screen(sys.stderr),
            is_stdin_terminal=_is_terminal(sys.stdin),
        )


def _detect_screen(stream: TextIO | None) -> Screen:
    # Imported late to keep --help fast.
    from tinkex.settings import read_terminal

    terminal = read_terminal()
    if stream is None or not _is_terminal(stream):
        # Never wrap lines in a file or pipe, so that grep finds whole paths.
        return Screen(width=terminal.num_columns)
    try:
        width = terminal.num_columns or os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        width = 80
    return Screen(is_terminal=True, is_colored=not terminal.is_plain, width=width)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        # The file is closed.
        return False


def get_context(ctx: click.Context) -> Context:
    """Return the context of the running command, with its global options applied."""
    base = ctx.find_object(Context) or Context.detect()
    return base._replace(**ctx.meta.get(GIVEN_OPTIONS_KEY, {}))


def pass_context(command: Callable[Concatenate[Context, P], T]) -> Callable[P, T]:
    """Pass the Context to a command as its first argument."""

    @functools.wraps(command)
    def with_context(*args: P.args, **kwargs: P.kwargs) -> T:
        return command(get_context(click.get_current_context()), *args, **kwargs)

    return with_context
