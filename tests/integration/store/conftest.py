"""Databases for the tests of the store: every test that asks for one runs on both kinds."""

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
    """The address of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    address = server.create_database()
    yield address
    server.drop_database(address)


@pytest.fixture
def open_database(url: str) -> Iterator[Callable[..., Database]]:
    """Opens the same database again and again, as other processes would."""
    with ExitStack() as stack:

        def open_it(**options: float) -> Database:
            return stack.enter_context(closing(Database(url, **options)))

        yield open_it


@pytest.fixture
def database(open_database: Callable[..., Database]) -> Database:
    """A store with all its tables."""
    database = open_database()
    migrate(database)
    return database
