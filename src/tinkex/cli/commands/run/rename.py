"""`tinkex run rename`: a name for a training run."""

from __future__ import annotations

import click

from tinkex.cli.client import rest_client
from tinkex.cli.completing import RUN, RUN_SUMMARY
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Argument, Command
from tinkex.cli.output import announce
from tinkex.cli.short_ids import resolve_run


@click.command(cls=Command)
@click.argument("run_id", type=RUN, cls=Argument, summary=RUN_SUMMARY)
@click.argument("name", cls=Argument, summary="Its new name; an empty one removes the name.")
@pass_context
def rename(context: Context, run_id: str, name: str) -> None:
    """Give a training run a name.

    Names need not be unique. `tinkex run list --search TEXT` finds runs by a part of their name.
    """
    wanted = name.strip() or None
    with rest_client(context) as client:
        run_id = resolve_run(client, run_id)
        client.rename_training_run(run_id, wanted).result()
    sentence = f"{run_id} has no name now." if wanted is None else f"{run_id} is called {wanted!r}."
    announce(context, sentence, {"training_run_id": run_id, "name": wanted})
