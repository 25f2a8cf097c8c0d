"""The first keys of a server: the one it is told, and the one that its home keeps for its owner."""

from __future__ import annotations

from tinkex import clock
from tinkex.checkpoint.atomic import write_file_atomic
from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.logs import get_logger
from tinkex.server.config import ServerConfig
from tinkex.server.listening import is_loopback
from tinkex.store import keys
from tinkex.store.database import Connection, Database

LOG = get_logger(__name__)
#: Whose the first keys are.
DEFAULT_TENANT = "default"


def ensure_keys(config: ServerConfig, home: Home, database: Database) -> None:
    """Make sure that the home's owner has a key, and refuse the network a server without one."""
    if config.api_key:
        database.write(lambda db: _insert_key(db, config.api_key, "told at start"))
    if not is_loopback(config.host) and not database.read(keys.has_keys):
        raise ConfigError(
            f"host is {config.host!r}, which others can reach, and no key protects the server",
            hint="Run `tinkex key create` first, or pass --api-key.",
        )
    secret = _read_key_file(home)
    if secret is not None and database.read(lambda db: keys.find_by_secret(db, secret)) is not None:
        return
    fresh = keys.generate_key()
    database.write(lambda db: _insert_key(db, fresh, "home"))
    write_file_atomic(home.key_file, fresh.encode() + b"\n", mode=0o600)
    LOG.info("a key of the tenant %r is in %s", DEFAULT_TENANT, home.key_file)


def _insert_key(db: Connection, secret: str, name: str) -> None:
    now = clock.now()
    tenant = keys.get_or_create_tenant(db, DEFAULT_TENANT, now)
    keys.insert_key(db, tenant.id, secret, name=name, now=now)


def _read_key_file(home: Home) -> str | None:
    try:
        return home.key_file.read_text("ascii").strip() or None
    except (FileNotFoundError, UnicodeDecodeError):
        return None
