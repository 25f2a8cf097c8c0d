"""`tinkex run` itself: which commands it has."""

from __future__ import annotations

import click

from tinkex.cli.lazy import DefaultGroup, Entry

_HOME = "tinkex.cli.commands.run"
COMMANDS = {
    "info": Entry(f"{_HOME}.info:info", "Show one training run."),
    "list": Entry(f"{_HOME}.list:list_runs", "List training runs, newest first."),
    "plot": Entry(f"{_HOME}.plot:plot", "Draw how a training run went."),
    "rename": Entry(f"{_HOME}.rename:rename", "Give a training run a name."),
    "sample": Entry(f"{_HOME}.sample:sample", "Sample from a base model or a checkpoint."),
    "watch": Entry(f"{_HOME}.watch:watch", "Follow a training run live."),
}


@click.group(cls=DefaultGroup, default_command="sample", entries=COMMANDS)
def run() -> None:
    """List training runs and sample from them.

    Options without a command mean `run sample`: tinkex run --prompt TEXT.
    """
