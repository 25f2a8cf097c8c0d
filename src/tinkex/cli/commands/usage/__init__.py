"""`tinkex usage` and `tinkex billing`: what was used, a module for each view."""

from __future__ import annotations

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.lazy import LazyCommand, LazyGroup

_PACKAGE = "tinkex.cli.commands.usage"
_TOKENS_SUMMARY = "Show what was used, hour by hour."
_STORAGE_SUMMARY = "Show what the stored checkpoints take now."
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
    help="How many days the summary goes back, 14 at most.",
)
@pass_context
def usage(context: Context, days: int) -> None:
    """Show tokens trained and sampled, and storage.

    Without a command: a summary of the last days, a line per model.
    """
    if click.get_current_context().invoked_subcommand is None:
        from tinkex.cli.commands.usage.reports import show_summary

        show_summary(context, days)


@click.group(cls=LazyGroup, entries=BILLING_COMMANDS)
def billing() -> None:
    """Show usage under the names of the official command line."""
