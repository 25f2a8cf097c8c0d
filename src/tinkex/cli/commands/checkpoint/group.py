"""`tinkex checkpoint` itself: which commands it has."""

from __future__ import annotations

import click

from tinkex.cli.lazy import DefaultGroup, Entry

_HOME = "tinkex.cli.commands.checkpoint"
COMMANDS = {
    "copy": Entry(f"{_HOME}.copy:copy", "Copy a checkpoint, into another project if you like."),
    "create": Entry(f"{_HOME}.create:create", "Make an adapter and save its weights."),
    "delete": Entry(f"{_HOME}.delete:delete", "Delete checkpoints for good."),
    "download": Entry(f"{_HOME}.download:download", "Download a checkpoint's files."),
    "export": Entry(f"{_HOME}.export:export", "Export a checkpoint for PEFT or transformers."),
    "info": Entry(f"{_HOME}.info:info", "Show one checkpoint."),
    "list": Entry(f"{_HOME}.list:list_checkpoints", "List checkpoints, newest first."),
    "publish": Entry(f"{_HOME}.publish:publish", "Let everybody use a checkpoint."),
    "push-hf": Entry(f"{_HOME}.push_hf:push_hf", "Push a checkpoint to the Hugging Face Hub."),
    "set-ttl": Entry(f"{_HOME}.set_ttl:set_ttl", "Say when a checkpoint expires."),
    "unpublish": Entry(f"{_HOME}.publish:unpublish", "Make a published checkpoint private again."),
}


@click.group(cls=DefaultGroup, default_command="create", entries=COMMANDS)
def checkpoint() -> None:
    """Save, list and manage checkpoints.

    Options without a command are those of `create`:

    \b
      tinkex checkpoint --base-model NAME --output made.json
    """
