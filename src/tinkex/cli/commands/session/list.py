"""`tinkex session list`: the sessions of this key."""

from __future__ import annotations

from typing import Any

import click

from tinkex.cli.access import has_no_records
from tinkex.cli.client import rest_client
from tinkex.cli.commands.listing import columns_option, limit_option
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import show
from tinkex.cli.output.sessions import SESSION_COLUMNS, SessionList
from tinkex.cli.progress import paged_progress_bar

STATUSES = ("active", "finished", "failed", "cancelled")


class KeyValuePair(click.ParamType[tuple[str, str]]):
    """A key and its value with = between them."""

    name = "pair"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Both parts."""
        if isinstance(value, tuple):
            return value
        key, equals, text = value.partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is no pair; write it as KEY=VALUE", param, ctx)
        return key, text


@click.command("list", cls=Command)
@limit_option()
@columns_option({name: column.summary for name, column in SESSION_COLUMNS.items()})
@click.option(
    "--status",
    "statuses",
    type=click.Choice(STATUSES),
    multiple=True,
    help="Only sessions in this state; may be given more than once.",
)
@click.option(
    "--project-id", "project_ids", multiple=True, metavar="ID", help="Only of this project."
)
@click.option("--name", metavar="WORDS", help="Only with these words in their name.")
@click.option(
    "--metadata",
    type=KeyValuePair(),
    multiple=True,
    metavar="KEY=VALUE",
    help="Only with this metadata.",
)
@click.option(
    "--scope",
    type=click.Choice(["owned", "accessible"]),
    default="owned",
    show_default=True,
    help="Your own sessions, or all that you may see.",
)
@pass_context
def list_sessions(
    context: Context, limit: int, columns: tuple[str, ...] | None, **filters: Any
) -> None:
    """List sessions, newest first."""
    if has_no_records(context):
        show(context, SessionList([], False, columns))
        return
    from tinkex.cli.commands.session.searching import SessionFilter, find_sessions

    with rest_client(context) as client, paged_progress_bar(context, "Fetching sessions") as told:
        found = find_sessions(client, SessionFilter(**filters), limit, told)
    show(context, SessionList(found.sessions, found.has_more, columns))
