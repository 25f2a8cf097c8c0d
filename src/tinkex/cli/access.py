"""Find the server and API key that a command would use, without sending a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.cli.context import Context

if TYPE_CHECKING:
    from tinkex.client.config import Config
    from tinkex.client.credentials import Credential

#: Shorter keys are masked completely.
_MIN_MASKED_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """A server and the credential for it."""

    config: Config
    base_url: str | None
    """None if the local server is used and is not running."""
    key: str | None = field(default=None, repr=False)
    """None if no key is configured, or if a credential command prints it."""
    source: str | None = None
    """Human-readable origin of the key; None without a key."""
    home: Path | None = None
    """Home directory of the local server, if that server is used."""

    @property
    def has_credential(self) -> bool:
        """Whether a key or a credential command is configured."""
        return self.source is not None

    @property
    def masked_key(self) -> str | None:
        """The key with its middle hidden."""
        return mask_key(self.key) if self.key else None


def find_access(context: Context, **settings: Any) -> ServerAccess:
    """Resolve server and key from options, environment, profiles and stored keys."""
    from tinkex.cli.client import build_config

    config = build_config(context, **settings)
    credential = find_config_credential(config)
    if credential is None and config.local_home is not None:
        return _find_local_access(config, config.local_home)
    if credential is None:
        return ServerAccess(config=config, base_url=config.base_url)
    return ServerAccess(
        config=config, base_url=config.base_url, key=credential.value, source=credential.source
    )


def find_config_credential(config: Config) -> Credential | None:
    """Return the credential that a client with this config would send."""
    from tinkex.client.credentials import find_credential

    is_from_variable = config.api_key == config.environment.api_key and not config.key_source
    explicit = None if is_from_variable else config.api_key
    return find_credential(explicit, config.environment, config.key_source)


def has_no_records(context: Context) -> bool:
    """Whether the command would start a local server whose home has no data yet.

    List commands then print an empty list instead of starting the server.
    """
    from tinkex.cli.client import build_config
    from tinkex.home import Home
    from tinkex.server_discovery import find_lock_holder
    from tinkex.settings import read_variables

    config = build_config(context)
    if (
        context.make_service
        or config.local_home is None
        or find_config_credential(config) is not None
    ):
        return False
    home = Home(config.local_home)
    # A configured server may store its data elsewhere.
    has_settings = home.config_file.exists() or bool(read_variables(["TINKEX_STORE"]))
    return not home.store_file.exists() and not has_settings and find_lock_holder(home) is None


def _find_local_access(config: Config, root: Path) -> ServerAccess:
    from tinkex.home import Home
    from tinkex.server_discovery import find_server

    home = Home(root)
    server = find_server(home)
    try:
        key = home.key_file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        key = ""
    if server is None or not key:
        return ServerAccess(config=config, base_url=server.url if server else None, home=root)
    source = str(home.key_file)
    return ServerAccess(config=config, base_url=server.url, key=key, source=source, home=root)


def mask_key(key: str) -> str:
    """Hide all of a key except its ends."""
    return f"{key[:4]}...{key[-4:]}" if len(key) >= _MIN_MASKED_CHARS else "***"
