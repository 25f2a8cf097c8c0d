"""What all rings share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.integration.store.postgres import PostgresServer

# A shell that starts this in the background has it ignore Ctrl-C, and so would every program under
# test.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Whoever runs the tests may say how wide his terminal is; tables must not be as wide as that.
os.environ.pop("COLUMNS", None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for the whole run."""
    server = PostgresServer()
    yield server
    server.stop()
