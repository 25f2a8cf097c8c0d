"""Database fixtures: every test that uses one runs on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.postgres import PostgresServer
from tinkex.store.database import Database
from tinkex.store.migrations import migrate


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    address = server.create_database()
    yield address
    server.drop_database(address)


@pytest.fixture
def open_database(url: str) -> Iterator[Callable[..., Database]]:
    """A function that opens the same database again, as another process would."""
    with ExitStack() as stack:

        def open_it(**options: float) -> Database:
            return stack.enter_context(closing(Database(url, **options)))

        yield open_it


@pytest.fixture
def database(open_database: Callable[..., Database]) -> Database:
    """A migrated store."""
    database = open_database()
    migrate(database)
    return database
