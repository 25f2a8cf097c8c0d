"""Check whether a credential is configured and accepted by the server."""

from __future__ import annotations

from tinkex.client.config import Config
from tinkex.client.credentials import find_credential
from tinkex.client.service import ServiceClient
from tinkex.errors import TinkexError
from tinkex.settings import read_environment

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """Return the configured key, or None; sends nothing and runs no command."""
    try:
        credential = find_credential(None, read_environment())
    except (OSError, TinkexError):
        return None
    return credential.value if credential is not None else None


def tinker_has_credentials() -> bool:
    """Return whether a credential is configured; a credential command counts but is not run."""
    try:
        return find_credential(None, read_environment()) is not None
    except (OSError, TinkexError):
        return False


def raise_if_tinker_not_accessible() -> None:
    """Raise a TinkexError unless the server accepts the configured credential.

    Sends the request once, without retries.
    """
    config = Config.new(max_retries=0, first_contact_seconds=0.0, outage_seconds=0.0)
    with ServiceClient(config=config) as client:
        client.get_server_capabilities().result()
