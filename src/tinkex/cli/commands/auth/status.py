"""Whose a key is, as far as a server says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import PropertiesOutput, show

if TYPE_CHECKING:
    from tinkex.cli.access import ServerAccess
    from tinkex.client.rest import RestClient
    from tinkex.wire.messages import ApiKeyReply


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOwner:
    """A key and who has it."""

    key_id: int | None = None
    key_name: str | None = None
    email: str | None = None
    organization: str | None = None

    @property
    def description(self) -> str:
        """The owner in a few words; empty if nothing is known."""
        who = self.email or self.organization or ""
        if self.email and self.organization:
            who = f"{self.email} ({self.organization})"
        key = f"key {self.key_name!r}" if self.key_name else ""
        return ", ".join(part for part in (who, key) if part)

    def to_dict(self) -> dict[str, Any]:
        """What is known, and null for the rest."""
        return {
            "key_id": self.key_id,
            "key_name": self.key_name,
            "email": self.email,
            "organization": self.organization,
        }


def parse_key_owner(reply: ApiKeyReply | None) -> KeyOwner:
    """The owner of a server's answer; servers differ in how much of it they fill in."""
    if reply is None:
        return KeyOwner()
    details = reply.details or {}
    return KeyOwner(
        key_id=reply.key_id,
        key_name=reply.name or None,
        email=_nested_text(details, "user_details", "email"),
        organization=_nested_text(details, "org_details", "name"),
    )


def _nested_text(details: dict[str, Any], group: str, name: str) -> str | None:
    found = details.get(group)
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, str) and value else None


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
    from tinkex.cli.client import rest_client
    from tinkex.cli.errors import describe_error
    from tinkex.cli.raw_requests import call_endpoint
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
    from tinkex.cli.raw_requests import fetch_api_key_info
    from tinkex.errors import ConfigError

    try:
        return client.whoami().result().model_dump()
    except ConfigError:
        # No tokens: the key itself may have a name.
        reply = fetch_api_key_info(client)
        if reply is None:
            raise
    return {"user_urn": None, "org_urn": None} | parse_key_owner(reply).to_dict()
