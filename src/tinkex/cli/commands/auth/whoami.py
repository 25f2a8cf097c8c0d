"""`tinkex auth whoami`: whose key is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import PropertiesOutput, show

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient


@click.command(cls=Command)
@pass_context
def whoami(context: Context) -> None:
    """Show whose key is used.

    A server with tokens names the user and the organization; one that knows keys alone names the
    owner of the key.
    """
    from tinkex.cli.client import rest_client
    from tinkex.cli.format import format_optional

    with rest_client(context) as client:
        found = _fetch_identity(client)
    rows = [
        ("Email", format_optional(found["email"])),
        ("User", format_optional(found["user_urn"])),
        ("Organization", format_optional(found["org_urn"] or found.get("organization"))),
    ]
    if found.get("key_name"):
        rows.append(("Key", found["key_name"]))
    show(context, PropertiesOutput(found, rows))


def _fetch_identity(client: RestClient) -> dict[str, Any]:
    from tinkex.cli.ask import fetch_api_key_info
    from tinkex.cli.commands.auth.owners import parse_key_owner
    from tinkex.errors import ConfigError

    try:
        return client.whoami().result().model_dump()
    except ConfigError:
        # No tokens: the key itself may have a name.
        reply = fetch_api_key_info(client)
        if reply is None:
            raise
    return {"user_urn": None, "org_urn": None} | parse_key_owner(reply).to_dict()
