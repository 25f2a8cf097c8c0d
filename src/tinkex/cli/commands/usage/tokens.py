"""`tinkex usage tokens`, also known as `billing usage`: what was used, hour by hour."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import click

from tinkex import clock
from tinkex.cli.client import admin_client
from tinkex.cli.commands.usage.csv_file import STDOUT_PATH, check_csv_targets, write_csv
from tinkex.cli.commands.usage.spans import FullHour, resolve_period
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Argument, Command
from tinkex.cli.output import announce, show

if TYPE_CHECKING:
    from tinkex.types import BillingUsageResponse

_CSV_HELP = "Write CSV to this file instead of printing a table; - is stdout."


@click.command("tokens", cls=Command)
@click.argument(
    "start",
    type=FullHour(),
    required=False,
    cls=Argument,
    summary="The first hour, as 2026-01-31T13:00:00Z, or a day; 7 days before END if left out.",
)
@click.argument(
    "end",
    type=FullHour(),
    required=False,
    cls=Argument,
    summary="The hour after the last, at most 14 days later; now if left out.",
)
@click.option("--csv", "csv_place", metavar="PATH", help=_CSV_HELP)
@click.option(
    "--sessions-csv",
    "sessions_place",
    metavar="PATH",
    help="Also write the metadata of each session as CSV; - is stdout.",
)
@pass_context
def tokens(
    context: Context,
    start: datetime | None,
    end: datetime | None,
    csv_place: str | None,
    sessions_place: str | None,
) -> None:
    """Show what was used, hour by hour.

    A row for each hour, kind of use, model and session: tokens trained, read and sampled,
    checkpoints made, storage. Costs are estimates where a server has prices, and no invoice.
    """
    check_csv_targets(context, csv_place, sessions_place)
    start, end = resolve_period(start, end, clock.utc_now())
    with admin_client(context) as client:
        found = client.get_billing_usage(start, end).result()
    from tinkex.cli.output.usage import UsageTable

    places = {"csv": csv_place, "sessions_csv": sessions_place}
    written = {name: place for name, place in places.items() if place is not None}
    if not written:
        show(context, UsageTable(found))
        return
    _write_csv_files(found, csv_place, sessions_place)
    if STDOUT_PATH not in written.values():
        rows = {"rows": len(found.data), "sessions": len(found.sessions)}
        announce(context, f"Wrote {' and '.join(written.values())}", written | rows)


def _write_csv_files(
    found: BillingUsageResponse, csv_place: str | None, sessions_place: str | None
) -> None:
    from tinkex.cli.output.usage import SESSION_FIELDS, USAGE_FIELDS, flatten_usage, session_rows

    if sessions_place is not None:
        write_csv(session_rows(found), SESSION_FIELDS, sessions_place)
    if csv_place is not None:
        write_csv(flatten_usage(found), USAGE_FIELDS, csv_place)


#: The same command under its official name.
billing_usage = Command(
    "usage", callback=tokens.callback, params=list(tokens.params), help=tokens.help
)
