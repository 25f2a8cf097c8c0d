"""`tinkex checkpoint info`: one checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tinkex.cli.client import rest_client
from tinkex.cli.completing import CHECKPOINT
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError
from tinkex.cli.options import Command
from tinkex.cli.output import show
from tinkex.cli.output.checkpoints import CheckpointInfo
from tinkex.cli.short_ids import expand_path
from tinkex.ids import parse_tinker_path

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.types import Checkpoint


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT)
@pass_context
def info(context: Context, path: str) -> None:
    """Show one checkpoint.

    PATH is its address, such as tinker://RUN_ID/weights/0001.
    """
    path = expand_path(context, path)
    run_id = parse_tinker_path(path).run_id
    with rest_client(context) as client:
        asked = client.get_training_run(run_id)
        saved = find_checkpoint(client, path)
        run = asked.result()
    show(context, CheckpointInfo(saved, run))


def find_checkpoint(client: RestClient, path: str) -> Checkpoint:
    """The checkpoint with this address, or a sentence that there is none."""
    run_id = parse_tinker_path(path).run_id
    for saved in client.list_checkpoints(run_id).result().checkpoints:
        if saved.tinker_path == path:
            return saved
    raise CliError(
        f"Checkpoint not found: {path}",
        f"`tinkex checkpoint list --run-id {run_id}` shows those of its run.",
    )
