"""What every command knows: the global options, and what it writes to."""

# No `from __future__ import annotations` here: NamedTuple compiles every annotation that is text,
# which takes a twentieth of the time in which the command line answers.

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO, TypeVar

import click

from tinkex.cli.options import GIVEN_OPTIONS_KEY

if TYPE_CHECKING:
    from tinkex.client.config import Config
    from tinkex.client.service import ServiceClient

T = TypeVar("T")
Format = Literal["table", "json"]


class Screen(NamedTuple):
    """What results are written to."""

    is_terminal: bool = False
    """Whether a person looks at it now."""
    is_colored: bool = False
    """Whether colours and links are welcome."""
    width: int | None = None
    """How wide a line may be; None is as wide as it gets."""


class Context(NamedTuple):
    """What every command is given; tests hand in their own."""

    format: Format = "table"
    """table for people, json for programs."""
    verbose: bool = False
    """Show the log, and tracebacks."""
    api_key: str | None = None
    base_url: str | None = None
    profile: str | None = None
    timeout_seconds: float | None = None
    """How long to wait for one answer; None leaves it to the client."""
    stdout: Screen = Screen()
    stderr: Screen = Screen()
    is_stdin_terminal: bool = False
    """Whether a person can answer questions."""
    make_service: "Callable[[Config], ServiceClient] | None" = None
    """Makes the client; None makes the real one."""

    def __repr__(self) -> str:
        # A key must not get into a traceback or a log.
        return f"Context(format={self.format!r}, base_url={self.base_url!r})"

    @property
    def is_json(self) -> bool:
        """Whether programs read the result."""
        return self.format == "json"

    @classmethod
    def detect(cls) -> "Context":
        """The context of this process as it was started."""
        return cls(
            stdout=_detect_screen(sys.stdout),
            stderr=_detect_screen(sys.stderr),
            is_stdin_terminal=_is_terminal(sys.stdin),
        )


def _detect_screen(stream: TextIO | None) -> Screen:
    # Late: help looks at no screen, and must be quick.
    from tinkex.settings import read_terminal

    terminal = read_terminal()
    if stream is None or not _is_terminal(stream):
        # Lines in a file or a pipe are never broken, so that grep finds whole paths.
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
        # A closed file is nobody's terminal.
        return False


def get_context(ctx: click.Context) -> Context:
    """The context of the command that is being run."""
    base = ctx.find_object(Context) or Context.detect()
    return base._replace(**ctx.meta.get(GIVEN_OPTIONS_KEY, {}))


def pass_context(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command its Context as the first argument."""

    @functools.wraps(command)
    def with_context(*args: Any, **kwargs: Any) -> T:
        return command(get_context(click.get_current_context()), *args, **kwargs)

    return with_context
