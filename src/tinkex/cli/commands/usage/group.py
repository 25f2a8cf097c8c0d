"""`tinkex usage` itself, and `tinkex billing`, which has the official names."""

from __future__ import annotations

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.lazy import Entry, LazyGroup

_HERE = "tinkex.cli.commands.usage"
_TOKENS = "Show what was used, hour by hour."
_STORAGE = "Show what the stored checkpoints take now."
USAGE_COMMANDS = {
    "storage": Entry(f"{_HERE}.storage:storage", _STORAGE),
    "tokens": Entry(f"{_HERE}.tokens:tokens", _TOKENS),
}
BILLING_COMMANDS = {
    "checkpoint-storage": Entry(f"{_HERE}.storage:checkpoint_storage", _STORAGE),
    "usage": Entry(f"{_HERE}.tokens:billing_usage", _TOKENS),
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
        from tinkex.cli.commands.usage.summary import show_summary

        show_summary(context, days)


@click.group(cls=LazyGroup, entries=BILLING_COMMANDS)
def billing() -> None:
    """Show usage under the names of the official command line."""
