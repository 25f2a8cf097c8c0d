"""`tinkex usage storage`, also known as `billing checkpoint-storage`."""

from __future__ import annotations

import click

from tinkex.cli.client import admin_client
from tinkex.cli.commands.usage.csv_file import STDOUT_PATH, check_csv_targets, write_csv
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import announce, show


@click.command("storage", cls=Command)
@click.option("--project-id", metavar="ID", help="Only what is in this project.")
@click.option(
    "--csv",
    "csv_place",
    metavar="PATH",
    help="Write CSV to this file instead of printing a table; - is stdout.",
)
@pass_context
def storage(context: Context, project_id: str | None, csv_place: str | None) -> None:
    """Show what the stored checkpoints take now.

    A row for each project and owner. The monthly cost is what 720 hours of it would cost, where a
    server has prices.
    """
    check_csv_targets(context, csv_place)
    with admin_client(context) as client:
        found = client.get_current_checkpoint_storage_usage(project_id).result()
    from tinkex.cli.output.usage import STORAGE_FIELDS, StorageTable

    result = StorageTable(found)
    if csv_place is None:
        show(context, result)
        return
    write_csv(result.csv_rows(), STORAGE_FIELDS, csv_place)
    if csv_place != STDOUT_PATH:
        data = {"csv": csv_place, "rows": len(found.data)}
        announce(context, f"Wrote {csv_place}", data)


#: The same command under its official name.
checkpoint_storage = Command(
    "checkpoint-storage", callback=storage.callback, params=list(storage.params), help=storage.help
)
