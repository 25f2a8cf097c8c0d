"""`tinkex run info`: one training run."""

from __future__ import annotations

import click

from tinkex.cli.client import rest_client
from tinkex.cli.completing import RUN, RUN_SUMMARY
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Argument, Command
from tinkex.cli.output import show
from tinkex.cli.short_ids import resolve_run


@click.command(cls=Command)
@click.argument("run_id", type=RUN, cls=Argument, summary=RUN_SUMMARY)
@pass_context
def info(context: Context, run_id: str) -> None:
    """Show one training run."""
    with rest_client(context) as client:
        found = client.get_training_run(resolve_run(client, run_id)).result()
    from tinkex.cli.output.runs import RunInfo

    show(context, RunInfo(found))
