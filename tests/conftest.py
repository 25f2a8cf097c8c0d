"""What all rings share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.store.postgres import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for the whole run."""
    server = PostgresServer()
    yield server
    server.stop()
