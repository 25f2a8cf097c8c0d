"""Machines that share a PostgreSQL store use its clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tinkex import clock
from tinkex.store.coordination import adopt_store_clock
from tinkex.store.database import Database

DAY_SECONDS = 86_400.0


@pytest.fixture(autouse=True)
def wrong_clock() -> Iterator[None]:
    """Set the clock of this process a day ahead, as on a machine without NTP."""
    offset = clock.CLOCK.offset
    clock.CLOCK.adopt_offset(offset + DAY_SECONDS)
    yield
    clock.CLOCK.adopt_offset(offset)


def test_process_adopts_clock_of_postgresql_only(database: Database) -> None:
    adopt_store_clock(database)
    ahead_seconds = clock.now() - clock.wall_now()
    expected = DAY_SECONDS if database.is_sqlite else 0.0
    assert ahead_seconds == pytest.approx(expected, abs=60.0)
