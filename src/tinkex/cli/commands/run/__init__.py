"""`tinkex run`: list, watch and plot training runs, and sample."""

from __future__ import annotations

import click

from tinkex.cli.lazy import DefaultGroup, LazyCommand

_PACKAGE = "tinkex.cli.commands.run"
COMMANDS = {
    "info": LazyCommand(f"{_PACKAGE}.list:info", "Show one training run."),
    "list": LazyCommand(f"{_PACKAGE}.list:list_runs", "List training runs, newest first."),
    "plot": LazyCommand(f"{_PACKAGE}.metrics:plot", "Plot a metric of a training run."),
    "rename": LazyCommand(f"{_PACKAGE}.list:rename", "Name a training run."),
    "sample": LazyCommand(f"{_PACKAGE}.sample:sample", "Sample from a base model or a checkpoint."),
    "watch": LazyCommand(f"{_PACKAGE}.metrics:watch", "Follow a training run live."),
}


@click.group(cls=DefaultGroup, default_command="sample", entries=COMMANDS)
def run() -> None:
    """List training runs and sample from them.

    Options without a command run `run sample`: tinkex run --prompt TEXT.
    """
