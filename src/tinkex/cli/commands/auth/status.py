"""`tinkex auth status`: which key is used, and whether the server takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import PropertiesOutput, show

if TYPE_CHECKING:
    from tinkex.cli.access import ServerAccess


@click.command(cls=Command)
@pass_context
def status(context: Context) -> None:
    """Say whether there is a key and the server takes it; exit code 1 if not."""
    from tinkex.cli.access import find_access
    from tinkex.cli.format import format_bool

    access = find_access(context)
    error = _find_access_problem(context, access)
    found: dict[str, Any] = {
        "credentials_available": access.has_credential,
        "accessible": error is None,
        "base_url": access.base_url,
        "profile": access.config.profile,
        "key": access.masked_key,
        "source": access.source,
        "error": error,
    }
    rows = [
        ("Credentials available", format_bool(access.has_credential)),
        ("Accessible", format_bool(error is None)),
        ("Server", access.base_url or f"the local one of {access.home}, which does not run"),
        ("Profile", access.config.profile or "none"),
        ("Key", access.masked_key or ("printed by a command" if access.source else "none")),
        ("Key from", access.source or "nowhere"),
        *([("Problem", error)] if error else []),
    ]
    show(context, PropertiesOutput(found, rows))
    if error is not None:
        click.get_current_context().exit(1)


def _find_access_problem(context: Context, access: ServerAccess) -> str | None:
    """Why the server cannot be used; None if it can."""
    from tinkex.cli.ask import call_endpoint
    from tinkex.cli.client import rest_client
    from tinkex.cli.errors import describe_error
    from tinkex.errors import TinkexError
    from tinkex.wire.endpoints import CAPABILITIES

    if access.base_url is None:
        return "No server runs here; the next command that needs one starts it."
    try:
        with rest_client(context) as client:
            call_endpoint(client, CAPABILITIES)
    except TinkexError as error:
        failure = describe_error(error)
        return " ".join(filter(None, (failure.message.rstrip(".") + ".", failure.hint)))
    return None
