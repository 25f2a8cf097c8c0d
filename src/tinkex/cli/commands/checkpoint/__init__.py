"""`tinkex checkpoint`: save, list and manage checkpoints."""

from __future__ import annotations

import click

from tinkex.cli.lazy import DefaultGroup, LazyCommand

_PACKAGE = "tinkex.cli.commands.checkpoint"
COMMANDS = {
    "alias": LazyCommand(
        f"{_PACKAGE}.alias:alias", "Name a checkpoint for clients of the OpenAI and Anthropic APIs."
    ),
    "copy": LazyCommand(
        f"{_PACKAGE}.edit:copy", "Copy a checkpoint, optionally to another project."
    ),
    "create": LazyCommand(f"{_PACKAGE}.create:create", "Create an adapter and save its weights."),
    "delete": LazyCommand(f"{_PACKAGE}.delete:delete", "Delete checkpoints permanently."),
    "download": LazyCommand(f"{_PACKAGE}.download:download", "Download a checkpoint's files."),
    "export": LazyCommand(
        f"{_PACKAGE}.export:export", "Export a checkpoint for PEFT or transformers."
    ),
    "info": LazyCommand(f"{_PACKAGE}.list:info", "Show one checkpoint."),
    "list": LazyCommand(f"{_PACKAGE}.list:list_checkpoints", "List checkpoints, newest first."),
    "publish": LazyCommand(f"{_PACKAGE}.edit:publish", "Make a checkpoint public."),
    "push-hf": LazyCommand(
        f"{_PACKAGE}.push_hf:push_hf", "Push a checkpoint to the Hugging Face Hub."
    ),
    "set-ttl": LazyCommand(f"{_PACKAGE}.edit:set_ttl", "Set or remove the expiry of a checkpoint."),
    "unpublish": LazyCommand(
        f"{_PACKAGE}.edit:unpublish", "Make a published checkpoint private again."
    ),
}


@click.group(cls=DefaultGroup, default_command="create", entries=COMMANDS)
def checkpoint() -> None:
    """Save, list and manage checkpoints.

    Options without a command run `create`:

    \b
      tinkex checkpoint --base-model NAME --output made.json
    """
