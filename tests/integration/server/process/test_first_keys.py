"""API keys created at startup, in the store and in the home."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.errors import ConfigError, InvalidInput
from tinkex.home import Home
from tinkex.server.config import ServerConfig
from tinkex.server.process.home_setup import ensure_keys
from tinkex.server.wiring import open_store
from tinkex.store import keys
from tinkex.store.database import Database

CONFIGURED_KEY = "tml-set-at-startup"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with open_store(ServerConfig(home=tmp_path)) as opened:
        yield opened


def prepare(tmp_path: Path, database: Database, **settings: str) -> str:
    """Ensure the keys, and return the home's key."""
    home = Home(tmp_path)
    ensure_keys(ServerConfig(home=tmp_path, **settings), home, database)
    return home.key_file.read_text().strip()


def names(database: Database) -> list[tuple[str, str, bool]]:
    listed = database.read(keys.list_keys)
    return [(tenant.name, key.name, key.revoked_at is None) for key, tenant in listed]


def test_home_key_is_created_once(tmp_path: Path, database: Database) -> None:
    key = prepare(tmp_path, database)
    assert prepare(tmp_path, database) == key
    assert names(database) == [("default", "home", True)]
    assert Home(tmp_path).key_file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"tml-of-another-store\n", b"\xff\xfe"])
def test_invalid_key_file_is_replaced(tmp_path: Path, database: Database, content: bytes) -> None:
    Home(tmp_path).key_file.write_bytes(content)
    key = prepare(tmp_path, database)
    assert database.read(lambda db: keys.find_by_secret(db, key)) is not None


def test_configured_key_is_idempotent(tmp_path: Path, database: Database) -> None:
    prepare(tmp_path, database, api_key=CONFIGURED_KEY)
    prepare(tmp_path, database, api_key=CONFIGURED_KEY)
    assert names(database) == [("default", "set at startup", True), ("default", "home", True)]


def test_revoked_configured_key_stays_revoked(tmp_path: Path, database: Database) -> None:
    prepare(tmp_path, database, api_key=CONFIGURED_KEY)
    database.write(lambda db: keys.revoke(db, 1, 1.0))
    with pytest.raises(InvalidInput, match="was revoked"):
        prepare(tmp_path, database, api_key=CONFIGURED_KEY)


def test_public_bind_requires_explicit_key(tmp_path: Path, database: Database) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="the server has no API key"):
            prepare(tmp_path, database, host="0.0.0.0")
    assert names(database) == []
    prepare(tmp_path, database, host="0.0.0.0", api_key=CONFIGURED_KEY)
    assert prepare(tmp_path, database, host="0.0.0.0").startswith("tml-")
