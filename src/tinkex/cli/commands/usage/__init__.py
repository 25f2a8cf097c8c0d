"""`tinkex usage` and `tinkex billing`: token usage and checkpoint storage."""

from __future__ import annotations

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.lazy import LazyCommand, LazyGroup

_PACKAGE = "tinkex.cli.commands.usage"
_TOKENS_SUMMARY = "Show usage per hour."
_STORAGE_SUMMARY = "Show the current checkpoint storage."
USAGE_COMMANDS = {
    "storage": LazyCommand(f"{_PACKAGE}.reports:storage", _STORAGE_SUMMARY),
    "tokens": LazyCommand(f"{_PACKAGE}.reports:tokens", _TOKENS_SUMMARY),
}
BILLING_COMMANDS = {
    "checkpoint-storage": LazyCommand(f"{_PACKAGE}.reports:checkpoint_storage", _STORAGE_SUMMARY),
    "usage": LazyCommand(f"{_PACKAGE}.reports:billing_usage", _TOKENS_SUMMARY),
}


@click.group(cls=LazyGroup, entries=USAGE_COMMANDS, invoke_without_command=True)
@click.option(
    "--days",
    type=click.IntRange(1, 14),
    default=7,
    show_default=True,
    metavar="N",
    help="Number of days in the summary.",
)
@pass_context
def usage(context: Context, days: int) -> None:
    """Show token usage and checkpoint storage.

    Without a command, print a summary of the last days with a row per model.
    """
    if click.get_current_context().invoked_subcommand is None:
        from tinkex.cli.commands.usage.reports import show_summary

        show_summary(context, days)


@click.group(cls=LazyGroup, entries=BILLING_COMMANDS)
def billing() -> None:
    """Show usage; same commands as the official CLI."""
