"""Leases and registered processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.store_rows import NOW
from tinkex.store import coordination
from tinkex.store.coordination import LeaseState
from tinkex.store.database import Database
from tinkex.store.records import ProcessRecord


def take(
    database: Database, owner: str, until: float, expired: LeaseState | None = None
) -> int | LeaseState:
    return database.write(
        lambda db: coordination.acquire_lease(db, "worker", owner, until=until, expired=expired)
    )


def renew(database: Database, epoch: int, until: float) -> bool:
    return database.write(lambda db: coordination.renew_lease(db, "worker", epoch, until=until))


def test_lease_has_one_owner_until_it_expires(database: Database) -> None:
    assert take(database, "a", NOW) == 1
    seen = take(database, "b", NOW)
    assert seen == LeaseState(epoch=1, until=NOW)
    assert database.read(lambda db: coordination.has_lease(db, "worker", 1))

    assert take(database, "b", NOW + 1, expired=seen) == 2
    assert not database.read(lambda db: coordination.has_lease(db, "worker", 1))
    assert not renew(database, 1, NOW + 2)
    assert take(database, "a", NOW + 2) == LeaseState(epoch=2, until=NOW + 1)


@pytest.mark.parametrize("jump", [-7200.0, 28 * 3600.0])
def test_renewed_lease_is_kept_regardless_of_contenders_clock(
    database: Database, jump: float
) -> None:
    assert take(database, "a", NOW) == 1
    seen = take(database, "b", NOW + jump)
    assert isinstance(seen, LeaseState)
    assert renew(database, 1, NOW + 5)
    again = take(database, "b", NOW + jump + 20, expired=seen)
    assert again == LeaseState(epoch=1, until=NOW + 5)
    assert take(database, "b", NOW + jump + 40, expired=again) == 2


def test_same_owner_gets_new_epoch_at_once(database: Database) -> None:
    assert [take(database, "a", NOW), take(database, "a", NOW)] == [1, 2]


def test_released_lease_can_be_acquired_with_a_higher_epoch(database: Database) -> None:
    assert take(database, "a", NOW) == 1
    database.write(lambda db: coordination.release_lease(db, "worker", 2))
    assert take(database, "b", NOW) == LeaseState(epoch=1, until=NOW)
    database.write(lambda db: coordination.release_lease(db, "worker", 1))
    assert take(database, "b", NOW) == 2


def test_concurrent_acquire_has_one_winner(
    database: Database, open_database: Callable[..., Database]
) -> None:
    others = [open_database() for _ in range(4)]
    wishes = [
        other.write_soon(
            lambda db, owner=str(place): coordination.acquire_lease(db, "w", owner, until=NOW)
        )
        for place, other in enumerate(others)
    ]
    granted = [wish.result() for wish in wishes]
    assert [epoch for epoch in granted if isinstance(epoch, int)] == [1]


def test_process_registration_and_removal(database: Database) -> None:
    old, new = (
        ProcessRecord(
            id=name, role="api", bell=f"127.0.0.1:{name}", started_at=NOW + at, seen_at=NOW
        )
        for name, at in (("1", 0), ("2", 1))
    )

    def alive(role: str, since: float) -> list[str]:
        processes = database.read(
            lambda db: coordination.list_alive_processes(db, role, since=since)
        )
        return [process.id for process in processes]

    for process in (new, old, old):
        database.write(lambda db, process=process: coordination.register_process(db, process))
    assert alive("api", NOW) == ["1", "2"]
    assert alive("worker", NOW) == []
    database.write(lambda db: coordination.register_process(db, replace(old, seen_at=NOW + 9)))
    assert alive("api", NOW + 5) == ["1"]
    database.write(lambda db: coordination.delete_dead_processes(db, before=NOW + 5, after=NOW + 9))
    assert alive("api", 0) == ["1"]
    # Registered by a server that stopped before the clock was set back.
    database.write(lambda db: coordination.register_process(db, replace(new, seen_at=NOW + 7200)))
    database.write(lambda db: coordination.delete_dead_processes(db, before=NOW + 5, after=NOW + 9))
    assert alive("api", 0) == ["1"]
    database.write(lambda db: coordination.unregister_process(db, "1"))
    assert alive("api", 0) == []
