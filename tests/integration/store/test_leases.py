"""Who serves the store, and who alone may do a thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.integration.store.rows import NOW
from tinkex.store import leases, processes
from tinkex.store.database import Database
from tinkex.store.records import Process


def test_a_lease_has_one_owner_until_it_ends(database: Database) -> None:
    def acquire(owner: str, now: float) -> int | None:
        return database.write(lambda db: leases.acquire(db, "worker", owner, now=now, seconds=10.0))

    first = acquire("a", NOW)
    assert first is not None
    assert acquire("b", NOW + 9) is None
    assert database.write(lambda db: leases.renew(db, "worker", first, now=NOW + 9, seconds=10.0))
    assert acquire("b", NOW + 18) is None
    assert database.read(lambda db: leases.holds(db, "worker", first))

    second = acquire("b", NOW + 19)
    assert second is not None
    assert second > first
    assert not database.read(lambda db: leases.holds(db, "worker", first))
    assert not database.write(
        lambda db: leases.renew(db, "worker", first, now=NOW + 20, seconds=10.0)
    )
    assert acquire("a", NOW + 20) is None


def test_the_same_owner_gets_a_new_number_at_once(database: Database) -> None:
    def acquire(owner: str) -> int | None:
        return database.write(lambda db: leases.acquire(db, "w", owner, now=NOW, seconds=10.0))

    first, second = acquire("a"), acquire("a")
    assert first is not None
    assert second is not None
    assert second > first


def test_a_released_lease_is_free_and_its_number_still_grows(database: Database) -> None:
    def acquire(owner: str) -> int | None:
        return database.write(lambda db: leases.acquire(db, "w", owner, now=NOW, seconds=10.0))

    first = acquire("a")
    assert first is not None
    database.write(lambda db: leases.release(db, "w", first + 1))
    assert acquire("b") is None
    database.write(lambda db: leases.release(db, "w", first))
    second = acquire("b")
    assert second is not None
    assert second > first


def test_of_many_who_want_a_lease_at_once_one_gets_it(
    database: Database, open_database: Callable[..., Database]
) -> None:
    others = [open_database() for _ in range(4)]
    wishes = [
        other.write_soon(
            lambda db, owner=str(place): leases.acquire(db, "w", owner, now=NOW, seconds=9.0)
        )
        for place, other in enumerate(others)
    ]
    granted = [wish.result() for wish in wishes]
    assert [epoch for epoch in granted if epoch is not None] == [1]


def test_processes_come_are_seen_and_go(database: Database) -> None:
    old, new = (
        Process(id=name, role="api", bell=f"127.0.0.1:{name}", started_at=NOW + at, seen_at=NOW)
        for name, at in (("1", 0), ("2", 1))
    )

    def alive(role: str, since: float) -> list[str]:
        found = database.read(lambda db: processes.alive(db, role, since=since))
        return [process.id for process in found]

    for process in (new, old, old):
        database.write(lambda db, process=process: processes.enter(db, process))
    assert alive("api", NOW) == ["1", "2"]
    assert alive("worker", NOW) == []
    database.write(lambda db: processes.enter(db, replace(old, seen_at=NOW + 9)))
    assert alive("api", NOW + 5) == ["1"]
    database.write(lambda db: processes.forget_dead(db, NOW + 5))
    assert alive("api", 0) == ["1"]
    database.write(lambda db: processes.leave(db, "1"))
    assert alive("api", 0) == []
