"""Fine-tunes from a JSONL file."""

from __future__ import annotations

import click

from tinkex.cli.lazy import LazyCommand, LazyGroup

COMMANDS = {
    "dpo": LazyCommand(
        "tinkex.cli.commands.train.recipes:dpo", "Learn to prefer the better of two answers."
    ),
    "rl": LazyCommand(
        "tinkex.cli.commands.train.recipes:rl", "Learn from a reward function of your own."
    ),
    "sft": LazyCommand("tinkex.cli.commands.train.recipes:sft", "Learn to say what the data says."),
}


@click.group(cls=LazyGroup, entries=COMMANDS)
def train() -> None:
    """Fine-tune a model with a JSONL file.

    A run keeps its plan, progress and metrics in a directory. Run the same command again, and an
    interrupted run goes on where it was saved last.
    """
