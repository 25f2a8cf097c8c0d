"""`tinkex checkpoint set-ttl`: when a checkpoint is deleted by itself."""

from __future__ import annotations

import click

from tinkex.cli.client import rest_client
from tinkex.cli.commands.checkpoint.parameters import Lifetime
from tinkex.cli.completing import CHECKPOINT
from tinkex.cli.context import Context, pass_context
from tinkex.cli.format import format_duration
from tinkex.cli.options import Command
from tinkex.cli.output import announce
from tinkex.cli.short_ids import expand_path


@click.command("set-ttl", cls=Command)
@click.argument("path", type=CHECKPOINT)
@click.option(
    "--ttl", type=Lifetime(), metavar="TIME", help="Delete it so long from now: 7d, 12h, seconds."
)
@click.option("--remove", is_flag=True, help="Keep it for ever.")
@pass_context
def set_ttl(context: Context, path: str, ttl: int | None, remove: bool) -> None:
    """Say when a checkpoint expires.

    PATH is its address, such as tinker://RUN_ID/weights/0001; the run must be your own.
    """
    if (ttl is None) is not remove:
        raise click.UsageError("Give either --ttl TIME or --remove.")
    path = expand_path(context, path)
    with rest_client(context) as client:
        client.set_checkpoint_ttl_from_tinker_path(path, ttl).result()
    sentence = "is kept for ever" if ttl is None else f"expires in {format_duration(ttl)}"
    announce(context, f"{path} {sentence}.", {"tinker_path": path, "ttl_seconds": ttl})
