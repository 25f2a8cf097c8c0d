"""`tinkex checkpoint publish` and `unpublish`: who may read a checkpoint."""

from __future__ import annotations

import click

from tinkex.cli.client import rest_client
from tinkex.cli.commands.checkpoint.asking import exit_cancelled, yes_option
from tinkex.cli.commands.checkpoint.info import find_checkpoint
from tinkex.cli.completing import CHECKPOINT
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import announce
from tinkex.cli.prompts import confirm
from tinkex.cli.short_ids import expand_path
from tinkex.errors import ConflictError
from tinkex.ids import parse_tinker_path


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT)
@pass_context
def publish(context: Context, path: str) -> None:
    """Let everybody use a checkpoint.

    PATH is its address, such as tinker://RUN_ID/weights/0001; the run must be your own.
    """
    _set_public(context, expand_path(context, path), True)


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT)
@yes_option()
@pass_context
def unpublish(context: Context, path: str, yes: bool) -> None:
    """Make a published checkpoint private again.

    PATH is its address, such as tinker://RUN_ID/weights/0001. Asks first if a person can answer.
    """
    path = expand_path(context, path)
    parse_tinker_path(path)
    # It can be undone: a script that says nothing means what it says.
    has_asked = context.is_stdin_terminal and not yes
    if has_asked and not confirm(f"Make {path} private? Others can no longer use it."):
        exit_cancelled(context, {"tinker_path": path, "changed": False})
    _set_public(context, path, False)


def _set_public(context: Context, path: str, is_public: bool) -> None:
    is_changed = True
    with rest_client(context) as client:
        change = (
            client.publish_checkpoint_from_tinker_path
            if is_public
            else client.unpublish_checkpoint_from_tinker_path
        )
        try:
            change(path).result()
        except ConflictError:
            if find_checkpoint(client, path).public is not is_public:
                raise
            is_changed = False
    announce(
        context,
        f"{path} is {'public' if is_public else 'private'} {'now' if is_changed else 'already'}.",
        {"tinker_path": path, "public": is_public, "changed": is_changed},
    )
