"""Which server and which key a command would use; nothing is asked and nothing is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.cli.context import Context

if TYPE_CHECKING:
    from tinkex.client.config import Config
    from tinkex.client.credentials import Credential

#: A key that is shorter is hidden as a whole.
_MIN_MASKED_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """A server, and what opens it."""

    config: Config
    base_url: str | None
    """None if it is this machine's own server, and that does not run."""
    key: str | None = field(default=None, repr=False)
    """None if there is none, or a command prints it."""
    source: str | None = None
    """Where the key comes from, in words for people; None if there is none."""
    home: Path | None = None
    """The home of this machine's own server, if that is meant."""

    @property
    def has_credential(self) -> bool:
        """Whether there is a key, or a command that prints one."""
        return self.source is not None

    @property
    def masked_key(self) -> str | None:
        """The key as people may see it."""
        return mask_key(self.key) if self.key else None


def find_access(context: Context, **settings: Any) -> ServerAccess:
    """What the options, the environment, the profiles and the stored keys say together."""
    from tinkex.cli.client import build_config

    config = build_config(context, **settings)
    found = find_config_credential(config)
    if found is None and config.local_home is not None:
        return _find_local_access(config, config.local_home)
    if found is None:
        return ServerAccess(config=config, base_url=config.base_url)
    return ServerAccess(
        config=config, base_url=config.base_url, key=found.value, source=found.source
    )


def find_config_credential(config: Config) -> Credential | None:
    """The credential that a client with these settings sends."""
    from tinkex.client.credentials import find_credential

    is_of_variable = config.api_key == config.environment.api_key and not config.key_source
    explicit = None if is_of_variable else config.api_key
    return find_credential(explicit, config.environment, config.key_source)


def has_no_records(context: Context) -> bool:
    """Whether a command would start the server of this machine in a home that has never had one.

    There is nothing to list then, and no reason to start it.
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
    # With settings of its own the server may keep its records elsewhere.
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
    """A key of which only the ends are told."""
    return f"{key[:4]}...{key[-4:]}" if len(key) >= _MIN_MASKED_CHARS else "***"
