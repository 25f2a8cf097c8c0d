"""Usage reports as tables or CSV: tokens, storage and summary."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex import clock
from tinkex.cli.client import admin_client
from tinkex.cli.commands.time_params import FullHour, resolve_period
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Argument, Command
from tinkex.cli.output import announce, show
from tinkex.cli.output.usage import UsageSummary
from tinkex.errors import NotFoundError

if TYPE_CHECKING:
    from tinkex.client.admin import AdminClient
    from tinkex.types import BillingUsageResponse
    from tinkex.types.billing import QuotaUsage

STDOUT_PATH = "-"


def check_csv_targets(context: Context, *places: str | None) -> None:
    """Raise UsageError if two outputs would go to stdout."""
    named = places.count(STDOUT_PATH)
    if named > 1:
        raise click.UsageError(
            "only one CSV table can be written to stdout; use a file for the other"
        )
    if named and context.is_json:
        raise click.UsageError("CSV on stdout cannot be combined with -f json; write it to a file")


def write_csv(rows: Sequence[Mapping[str, object]], columns: Sequence[str], target: str) -> None:
    """Write rows as CSV to a file, atomically, or to stdout; extra columns come last."""
    extra = [key for row in rows for key in row if key not in columns]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*columns, *dict.fromkeys(extra)], restval="")
    writer.writeheader()
    writer.writerows(rows)
    if target == STDOUT_PATH:
        sys.stdout.write(text.getvalue())
        return
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.partial")
    try:
        scratch.write_text(text.getvalue(), encoding="utf-8", newline="")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


_CSV_HELP = "Write CSV to this file instead of a table; - is stdout."


@click.command("tokens", cls=Command)
@click.argument(
    "start",
    type=FullHour(),
    required=False,
    cls=Argument,
    summary="First hour, such as 2026-01-31T13:00:00Z, or a day.  [default: 7 days before END]",
)
@click.argument(
    "end",
    type=FullHour(),
    required=False,
    cls=Argument,
    summary="Hour after the last one, at most 14 days later.  [default: now]",
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
    """Show usage per hour.

    Prints a row for each hour, kind of usage, model and session: trained, prompt and sampled
    tokens, saved checkpoints, storage. Costs are estimates from the server's prices, not invoices.
    """
    check_csv_targets(context, csv_place, sessions_place)
    start, end = resolve_period(start, end, clock.utc_now())
    with admin_client(context) as client:
        usage = client.get_billing_usage(start, end).result()
    from tinkex.cli.output.usage import UsageTable

    places = {"csv": csv_place, "sessions_csv": sessions_place}
    written = {name: place for name, place in places.items() if place is not None}
    if not written:
        show(context, UsageTable(usage))
        return
    _write_csv_files(usage, csv_place, sessions_place)
    if STDOUT_PATH not in written.values():
        rows = {"rows": len(usage.data), "sessions": len(usage.sessions)}
        announce(context, f"Wrote {' and '.join(written.values())}", {**written, **rows})


def _write_csv_files(
    usage: BillingUsageResponse, csv_place: str | None, sessions_place: str | None
) -> None:
    from tinkex.cli.output.usage import SESSION_FIELDS, USAGE_FIELDS, flatten_usage, session_rows

    if sessions_place is not None:
        write_csv(session_rows(usage), SESSION_FIELDS, sessions_place)
    if csv_place is not None:
        write_csv(flatten_usage(usage), USAGE_FIELDS, csv_place)


#: The command under its official name.
billing_usage = Command(
    "usage", callback=tokens.callback, params=list(tokens.params), help=tokens.help
)


@click.command("storage", cls=Command)
@click.option("--project-id", metavar="ID", help="Only checkpoints of this project.")
@click.option(
    "--csv",
    "csv_place",
    metavar="PATH",
    help=_CSV_HELP,
)
@pass_context
def storage(context: Context, project_id: str | None, csv_place: str | None) -> None:
    """Show the current checkpoint storage.

    Prints a row for each project and owner. The monthly cost is the price of 720 hours, if the
    server has prices.
    """
    check_csv_targets(context, csv_place)
    with admin_client(context) as client:
        usage = client.get_current_checkpoint_storage_usage(project_id).result()
    from tinkex.cli.output.usage import STORAGE_FIELDS, StorageTable

    result = StorageTable(usage)
    if csv_place is None:
        show(context, result)
        return
    write_csv(result.csv_rows(), STORAGE_FIELDS, csv_place)
    if csv_place != STDOUT_PATH:
        data = {"csv": csv_place, "rows": len(usage.data)}
        announce(context, f"Wrote {csv_place}", data)


#: The command under its official name.
checkpoint_storage = Command(
    "checkpoint-storage", callback=storage.callback, params=list(storage.params), help=storage.help
)


def show_summary(context: Context, days: int) -> None:
    """Print usage per model and the current storage."""
    start, end = resolve_period(None, None, clock.utc_now(), timedelta(days=days))
    with admin_client(context) as client:
        used = client.get_billing_usage(start, end).result()
        stored = client.get_current_checkpoint_storage_usage().result()
        quotas = _fetch_quotas(client)
    show(context, UsageSummary(used, stored, quotas, start, end))


def _fetch_quotas(client: AdminClient) -> list[QuotaUsage]:
    """Fetch the caller's quotas; empty if the server does not report them."""
    try:
        return client.get_quotas().result().quotas
    except NotFoundError:
        return []
