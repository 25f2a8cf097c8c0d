"""`tinkex checkpoint copy`: the same weights under an address of one's own."""

from __future__ import annotations

import click

from tinkex.cli.client import rest_client
from tinkex.cli.commands.checkpoint.parameters import Lifetime
from tinkex.cli.completing import CHECKPOINT
from tinkex.cli.context import Context, pass_context
from tinkex.cli.format import format_duration
from tinkex.cli.options import Command
from tinkex.cli.output import PropertiesOutput, show
from tinkex.cli.short_ids import expand_path


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT)
@click.option("--project-id", metavar="ID", help="The project that gets the copy.")
@click.option(
    "--ttl", type=Lifetime(), metavar="TIME", help="Delete the copy so long from now: 7d, 12h."
)
@click.option(
    "--access-token", metavar="TOKEN", help="A credential for PATH, if another account owns it."
)
@pass_context
def copy(
    context: Context,
    path: str,
    project_id: str | None,
    ttl: int | None,
    access_token: str | None,
) -> None:
    """Copy a checkpoint, into another project if you like.

    PATH is its address, such as tinker://RUN_ID/weights/0001: one of your own, a public one, or
    one that the access token opens.
    """
    path = expand_path(context, path)
    with rest_client(context, project_id=project_id) as client:
        # Where no project is named, Config may know one.
        project = client.holder.config.project_id
        copied = client.copy_weights(
            path, project, ttl_seconds=ttl, weights_access_token=access_token
        ).result()
    rows = [
        ("Tinker Path", copied),
        ("Copied From", path),
        *([("Project", project)] if project else []),
        ("Expires", "Never" if ttl is None else f"in {format_duration(ttl)}"),
    ]
    data = {
        "tinker_path": copied,
        "source_path": path,
        "project_id": project,
        "ttl_seconds": ttl,
    }
    show(context, PropertiesOutput(data, rows, "Checkpoint copied"))
