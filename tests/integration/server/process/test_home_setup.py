"""A home can only be served with its own store."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.server.process.home_setup import bind_home_to_store
from tinkex.store.database import Database
from tinkex.store.migrations import migrate


def _bind(home: Home, file: Path) -> None:
    with closing(Database(f"sqlite:///{file}")) as database:
        migrate(database)
        bind_home_to_store(home, database)


def test_home_rejects_other_store(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for _ in range(2):
        _bind(home, tmp_path / "store.db")
    with pytest.raises(ConfigError, match="belong to another store"):
        _bind(home, tmp_path / "another.db")
    _bind(home, tmp_path / "store.db")


def test_store_file_has_owner_only_permissions(tmp_path: Path) -> None:
    _bind(Home(tmp_path), tmp_path / "store.db")
    assert {path.stat().st_mode & 0o077 for path in tmp_path.glob("store.db*")} == {0}
