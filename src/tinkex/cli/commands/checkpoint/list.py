"""`tinkex checkpoint list`: the checkpoints of this key, or of one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tinkex.cli.access import has_no_records
from tinkex.cli.client import rest_client
from tinkex.cli.commands.listing import columns_option, limit_option
from tinkex.cli.completing import RUN
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import show
from tinkex.cli.output.checkpoints import CHECKPOINT_COLUMNS, CheckpointList
from tinkex.cli.paging import Listing, fetch_pages
from tinkex.cli.progress import paged_progress_bar
from tinkex.cli.short_ids import resolve_run

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.types import Checkpoint

PAGE_SIZE = 1000
DEFAULT_LIMIT = 20


@click.command("list", cls=Command)
@click.option("--run-id", type=RUN, metavar="ID", help="All checkpoints of this run.")
@limit_option(None, f"How many to show at most; 0 shows all.  [default: {DEFAULT_LIMIT}]")
@columns_option({name: column.summary for name, column in CHECKPOINT_COLUMNS.items()})
@pass_context
def list_checkpoints(
    context: Context, run_id: str | None, limit: int | None, columns: tuple[str, ...] | None
) -> None:
    """List checkpoints, newest first."""
    if run_id is None and has_no_records(context):
        show(context, CheckpointList(Listing([], 0), run_id, columns))
        return
    with rest_client(context) as client:
        if run_id is not None:
            run_id = resolve_run(client, run_id)
            found = _fetch_run_checkpoints(client, run_id, limit or 0)
        else:
            found = fetch_checkpoints(context, client, DEFAULT_LIMIT if limit is None else limit)
    show(context, CheckpointList(found, run_id, columns))


def fetch_checkpoints(context: Context, client: RestClient, limit: int = 0) -> Listing[Checkpoint]:
    """The newest checkpoints of this key, 0 for all of them; long lists show a bar."""

    def ask(limit: int, offset: int) -> Listing[Checkpoint]:
        page = client.list_user_checkpoints(limit, offset).result()
        total = page.cursor.total_count if page.cursor else offset + len(page.checkpoints)
        return Listing(page.checkpoints, total)

    with paged_progress_bar(context, "Fetching checkpoints") as told:
        return fetch_pages(ask, limit, PAGE_SIZE, told)


def _fetch_run_checkpoints(client: RestClient, run_id: str, limit: int) -> Listing[Checkpoint]:
    found = client.list_checkpoints(run_id).result().checkpoints
    return Listing(found[:limit] if limit else found, len(found))
