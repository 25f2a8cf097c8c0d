"""`tinkex session finish`: end a session that its client left open."""

from __future__ import annotations

import click

from tinkex.cli.ask import call_endpoint
from tinkex.cli.client import rest_client
from tinkex.cli.completing import SESSION, SESSION_SUMMARY
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Argument, Command
from tinkex.cli.output import announce
from tinkex.cli.short_ids import resolve_session


@click.command(cls=Command)
@click.argument("session_id", type=SESSION, cls=Argument, summary=SESSION_SUMMARY)
@click.option(
    "--status",
    type=click.Choice(["success", "errored", "interrupted"]),
    default="interrupted",
    show_default=True,
    help="How it ended; what a server was told first stays.",
)
@click.option("--detail", metavar="TEXT", help="A word about it, kept with the session.")
@pass_context
def finish(context: Context, session_id: str, status: str, detail: str | None) -> None:
    """End a session on the server.

    Its client, should it still run, can do no more work in it. Checkpoints and training runs stay.
    """
    from tinkex.cli.commands.session.searching import session_not_found_error
    from tinkex.client.session import FINISH_REASONS
    from tinkex.errors import NotFoundError
    from tinkex.wire.endpoints import FINISH_SESSION
    from tinkex.wire.messages import FinishSessionRequest

    message = FinishSessionRequest(reason=FINISH_REASONS[status], detail=detail)
    try:
        with rest_client(context) as client:
            session_id = resolve_session(client, session_id)
            call_endpoint(client, FINISH_SESSION, message, {"session_id": session_id})
    except NotFoundError as error:
        raise session_not_found_error(session_id) from error
    announce(
        context,
        f"Session {session_id} is finished.",
        {"session_id": session_id, "finished": True, "status": status},
    )
