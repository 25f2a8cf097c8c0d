"""`tinkex train`: fine-tune a model on a JSONL file."""

from __future__ import annotations

import click

from tinkex.cli.lazy import LazyCommand, LazyGroup

COMMANDS = {
    "dpo": LazyCommand("tinkex.cli.commands.train.recipes:dpo", "Train on preferences (DPO)."),
    "rl": LazyCommand("tinkex.cli.commands.train.recipes:rl", "Train with a reward function (RL)."),
    "sft": LazyCommand(
        "tinkex.cli.commands.train.recipes:sft", "Train on conversations or completions (SFT)."
    ),
}


@click.group(cls=LazyGroup, entries=COMMANDS)
def train() -> None:
    """Fine-tune a model on a JSONL file.

    A run stores its plan, progress and metrics in a directory. After an interruption, the same
    command resumes from the last checkpoint.
    """
