"""`tinkex auth status` and `whoami`: check the key and show its owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import PropertiesOutput, show

if TYPE_CHECKING:
    from tinkex.cli.client import ServerAccess
    from tinkex.client.rest import RestClient
    from tinkex.wire.messages import ApiKeyReply


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOwner:
    """An API key and its owner."""

    key_id: int | None = None
    key_name: str | None = None
    email: str | None = None
    organization: str | None = None

    @property
    def description(self) -> str:
        """A short description of the owner; empty if unknown."""
        who = self.email or self.organization or ""
        if self.email and self.organization:
            who = f"{self.email} ({self.organization})"
        key = f"key {self.key_name!r}" if self.key_name else ""
        return ", ".join(part for part in (who, key) if part)

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON data; unknown ones are null."""
        return {
            "key_id": self.key_id,
            "key_name": self.key_name,
            "email": self.email,
            "organization": self.organization,
        }


def parse_key_owner(reply: ApiKeyReply | None) -> KeyOwner:
    """Read the owner from a server's reply; servers fill in different fields."""
    if reply is None:
        return KeyOwner()
    details = reply.details or {}
    return KeyOwner(
        key_id=reply.key_id,
        key_name=reply.name or None,
        email=_nested_text(details, "user_details", "email"),
        organization=_nested_text(details, "org_details", "name"),
    )


def _nested_text(details: dict[str, object], group: str, name: str) -> str | None:
    fields = details.get(group)
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, str) and value else None


@click.command(cls=Command)
@pass_context
def status(context: Context) -> None:
    """Show whether a key is configured and accepted; exit code 1 if not."""
    from tinkex.cli.client import find_access
    from tinkex.cli.format import format_bool

    access = find_access(context)
    error = _find_access_problem(context, access)
    data: dict[str, object] = {
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
        ("Server", access.base_url or f"local server in {access.home} (not running)"),
        ("Profile", access.config.profile or "none"),
        ("Key", access.masked_key or ("printed by a command" if access.source else "none")),
        ("Key from", access.source or "none"),
        *([("Problem", error)] if error else []),
    ]
    show(context, PropertiesOutput(data, rows))
    if error is not None:
        click.get_current_context().exit(1)


def _find_access_problem(context: Context, access: ServerAccess) -> str | None:
    """Return why the server cannot be used; None if it can."""
    from tinkex.cli.client import call_endpoint, rest_client
    from tinkex.cli.errors import describe_error
    from tinkex.errors import TinkexError
    from tinkex.wire.endpoints import CAPABILITIES

    if access.base_url is None:
        return "The local server is not running; the next command that needs it starts it."
    try:
        with rest_client(context) as client:
            call_endpoint(client, CAPABILITIES)
    except TinkexError as error:
        report = describe_error(error)
        return " ".join(filter(None, (report.message.rstrip(".") + ".", report.hint)))
    return None


@click.command(cls=Command)
@pass_context
def whoami(context: Context) -> None:
    """Show the owner of the key.

    A server with user tokens reports the user and organization; other servers report the name of
    the key.
    """
    from tinkex.cli.client import rest_client
    from tinkex.cli.format import format_optional

    with rest_client(context) as client:
        identity = _fetch_identity(client)
    rows = [
        ("Email", format_optional(identity["email"])),
        ("User", format_optional(identity["user_urn"])),
        ("Organization", format_optional(identity["org_urn"] or identity.get("organization"))),
    ]
    if identity.get("key_name"):
        rows.append(("Key", str(identity["key_name"])))
    show(context, PropertiesOutput(identity, rows))


def _fetch_identity(client: RestClient) -> dict[str, object]:
    from tinkex.cli.client import fetch_api_key_info
    from tinkex.errors import ConfigError

    try:
        return client.whoami().result().model_dump()
    except ConfigError:
        # No user tokens: the key itself may have a name.
        reply = fetch_api_key_info(client)
        if reply is None:
            raise
    return {"user_urn": None, "org_urn": None} | parse_key_owner(reply).to_dict()
