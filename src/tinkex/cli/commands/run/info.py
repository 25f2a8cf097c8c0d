"""`tinkex run info`: one training run."""

from __future__ import annotations

import click

from tinkex.cli.client import rest
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import show


@click.command(cls=Command)
@click.argument("run_id")
@pass_context
def info(context: Context, run_id: str) -> None:
    """Show one training run."""
    with rest(context) as client:
        found = client.get_training_run(run_id).result()
    from tinkex.cli.output.runs import RunInfo

    show(context, RunInfo(found))
