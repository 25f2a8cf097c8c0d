"""`tinkex run list`, `info` and `rename`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

import click

from tinkex.cli.client import Listing, fetch_pages, has_no_records, rest_client
from tinkex.cli.context import Context, pass_context
from tinkex.cli.id_arguments import RUN, RUN_SUMMARY, resolve_run
from tinkex.cli.options import Argument, Command, columns_option, limit_option
from tinkex.cli.output import announce, show
from tinkex.cli.output.runs import RUN_COLUMNS, RunList
from tinkex.cli.progress import paged_progress_bar

if TYPE_CHECKING:
    from tinkex.types import TrainingRun

PAGE_SIZE = 100


@click.command("list", cls=Command)
@limit_option()
@columns_option({name: column.summary for name, column in RUN_COLUMNS.items()})
@click.option(
    "--search",
    metavar="TEXT",
    help="Only runs whose id starts with TEXT or whose name contains it.",
)
@click.option("--project-id", metavar="ID", help="Only runs of this project.")
@click.option(
    "--scope",
    type=click.Choice(["owned", "accessible"]),
    default="owned",
    show_default=True,
    help="Only your own runs, or also public ones.",
)
@pass_context
def list_runs(
    context: Context,
    limit: int,
    columns: tuple[str, ...] | None,
    search: str | None,
    project_id: str | None,
    scope: Literal["owned", "accessible"],
) -> None:
    """List training runs, newest first."""
    if has_no_records(context):
        show(context, RunList(Listing([], 0), columns))
        return
    with (
        rest_client(context) as client,
        paged_progress_bar(context, "Fetching training runs") as on_progress,
    ):
        list_page = client.list_training_runs
        if search is not None:
            list_page = partial(client.find_training_runs, search)

        def fetch_page(limit: int, offset: int) -> Listing[TrainingRun]:
            page = list_page(limit, offset, scope, project_id).result()
            return Listing(page.training_runs, page.cursor.total_count)

        runs = fetch_pages(fetch_page, limit, PAGE_SIZE, on_progress)
    show(context, RunList(runs, columns))


@click.command(cls=Command)
@click.argument("run_id", type=RUN, cls=Argument, summary=RUN_SUMMARY)
@pass_context
def info(context: Context, run_id: str) -> None:
    """Show one training run."""
    with rest_client(context) as client:
        run = client.get_training_run(resolve_run(client, run_id)).result()
    from tinkex.cli.output.runs import RunInfo

    show(context, RunInfo(run))


@click.command(cls=Command)
@click.argument("run_id", type=RUN, cls=Argument, summary=RUN_SUMMARY)
@click.argument("name", cls=Argument, summary="New name; an empty one removes the name.")
@pass_context
def rename(context: Context, run_id: str, name: str) -> None:
    """Name a training run.

    Names need not be unique. `tinkex run list --search TEXT` finds runs by a part of their name.
    """
    new_name = name.strip() or None
    with rest_client(context) as client:
        run_id = resolve_run(client, run_id)
        client.rename_training_run(run_id, new_name).result()
    sentence = (
        f"Removed the name of {run_id}."
        if new_name is None
        else f"{run_id} is now named {new_name!r}."
    )
    announce(context, sentence, {"training_run_id": run_id, "name": new_name})
