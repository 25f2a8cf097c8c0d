"""`tinkex session info`: one session."""

from __future__ import annotations

from typing import Literal

import click

from tinkex.cli.client import rest_client
from tinkex.cli.completing import SESSION, SESSION_SUMMARY
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Argument, Command
from tinkex.cli.output import show
from tinkex.cli.short_ids import resolve_session


@click.command(cls=Command)
@click.argument("session_id", type=SESSION, cls=Argument, summary=SESSION_SUMMARY)
@click.option(
    "--scope",
    type=click.Choice(["owned", "accessible"]),
    default="owned",
    show_default=True,
    help="One of your own, or one that you may see.",
)
@pass_context
def info(context: Context, session_id: str, scope: Literal["owned", "accessible"]) -> None:
    """Show one session: how it is doing, its training runs and its samplers."""
    from tinkex.cli.commands.session.searching import find_session
    from tinkex.cli.output.sessions import SessionInfo

    with rest_client(context) as client:
        session_id = resolve_session(client, session_id)
        found = find_session(client, session_id, scope)
    show(context, SessionInfo(found))
