"""`tinkex checkpoint alias`."""

from __future__ import annotations

import click

from tinkex.cli.client import rest_client
from tinkex.cli.context import Context, pass_context
from tinkex.cli.id_arguments import CHECKPOINT, expand_path
from tinkex.cli.options import Command
from tinkex.cli.output import announce, show
from tinkex.cli.output.checkpoints import AliasList


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT, required=False)
@click.argument("name", required=False)
@click.option("--list", "is_list", is_flag=True, help="List your aliases.")
@click.option("--remove", metavar="NAME", help="Remove an alias; its checkpoint stays.")
@pass_context
def alias(
    context: Context, path: str | None, name: str | None, is_list: bool, remove: str | None
) -> None:
    """Name a checkpoint for clients of the OpenAI and Anthropic APIs.

    \b
      tinkex checkpoint alias tinker://RUN_ID/sampler_weights/0001 pirate

    Clients then use NAME as their model. A name that exists is moved to PATH; requests that run
    keep the weights they have.
    """
    num_uses = (name is not None) + is_list + (remove is not None)
    if num_uses != 1 or (path is None) is not (name is None):
        raise click.UsageError("Give PATH and NAME, or --list, or --remove NAME.")
    with rest_client(context) as client:
        if is_list:
            show(context, AliasList(client.list_aliases().result()))
        elif remove is not None:
            client.delete_alias(remove).result()
            announce(context, f"The alias {remove} is removed.", {"name": remove, "removed": True})
        else:
            assert path is not None and name is not None
            path = expand_path(context, path)
            changed = client.set_alias(path, name).result()
            was = f" instead of {changed.previous_path}" if changed.previous_path else ""
            data = {
                "name": name,
                "tinker_path": path,
                "previous_path": changed.previous_path,
            }
            announce(context, f"{name} is {path} now{was}.", data)
