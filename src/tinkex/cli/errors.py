"""How a command fails: one sentence, what to do next, and an exit code."""

from __future__ import annotations

from typing import Any

import click

from tinkex.cli.lazy import LazyGroup
from tinkex.errors import ConfigError, TinkexError

#: What a shell expects of a program that was stopped by Ctrl-C.
INTERRUPTED = 130


class Refusal(click.ClickException):
    """An error of ours, as the command line shows it."""

    def __init__(self, error: TinkexError) -> None:
        super().__init__(error.message)
        self.hint = error.hint

    def format_message(self) -> str:
        """The sentence, and below it what to do."""
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class ReportingGroup(LazyGroup):
    """Turns errors that are somebody's to fix into sentences; others stay tracebacks."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except TinkexError as error:
            raise Refusal(error) from error
        except OSError as error:
            if error.filename is None:
                raise
            raise Refusal(unusable(error)) from error
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None


def unusable(error: OSError) -> ConfigError:
    """What to say when a file or directory is not what a command needs."""
    return ConfigError(
        f"{error.filename} cannot be used: {error.strerror}",
        hint="Make it readable and writable for this user, or pass another --home.",
    )


def needs_extra(error: ModuleNotFoundError, extra: str) -> ConfigError:
    """What to say when a part of this package is used whose libraries are not installed."""
    return ConfigError(
        f"this command needs {error.name}, which is not installed",
        hint=f"Run: pip install 'tinkex[{extra}]'",
    )
