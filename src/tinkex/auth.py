"""Is there a credential, and does the server accept it?"""

from __future__ import annotations

from tinkex.client.config import Config
from tinkex.client.credentials import find_credential
from tinkex.client.service import ServiceClient
from tinkex.errors import TinkexError
from tinkex.settings import read_environment

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """The configured key, or None; looks only here and runs no command."""
    try:
        found = find_credential(None, read_environment())
    except (OSError, TinkexError):
        return None
    return found.value if found is not None else None


def tinker_has_credentials() -> bool:
    """Whether a credential is configured; a credential command counts without being run."""
    try:
        return find_credential(None, read_environment()) is not None
    except (OSError, TinkexError):
        return False


def raise_if_tinker_not_accessible() -> None:
    """Return if the server accepts the configured credential, raise a TinkexError if not.

    Asks once: a failure is an answer here, not something to wait out.
    """
    config = Config.new(max_retries=0, first_contact_seconds=0.0, outage_seconds=0.0)
    with ServiceClient(config=config) as client:
        client.get_server_capabilities()
