"""Runs and samplers: found, listed, and who may see them."""

from __future__ import annotations

from tests.integration.store.rows import (
    NOW,
    add_checkpoint,
    add_run,
    add_sampler,
    add_session,
    add_tenant,
)
from tinkex.store import runs, samplers
from tinkex.store.database import Database


def test_a_run_comes_back_as_it_was_stored(database: Database) -> None:
    session = add_session(database, add_tenant(database))
    run = add_run(database, session, spec={"rank": 8, "seed": None}, user_metadata={"a": "b"})
    assert database.read(lambda db: runs.find(db, run.id)) == run
    database.write(lambda db: runs.touch(db, run.id, NOW + 5))
    found = database.read(lambda db: runs.find(db, run.id))
    assert found is not None
    assert found.used_at == NOW + 5
    assert database.read(lambda db: runs.of_session(db, session.id)) == [found]


def test_pages_are_newest_first_with_the_number_of_all(database: Database) -> None:
    alice, bob = add_tenant(database, "alice"), add_tenant(database, "bob")
    mine = add_session(database, alice, project_id="p")
    made = [add_run(database, mine, created_at=NOW + i) for i in range(3)]
    theirs = add_run(database, add_session(database, bob), created_at=NOW + 9)
    page = database.read(lambda db: runs.page(db, alice.id, limit=2, offset=0))
    assert page == ([made[2], made[1]], 3)
    in_project = database.read(
        lambda db: runs.page(db, alice.id, limit=9, offset=0, project_id="other")
    )
    assert in_project == ([], 0)

    assert not database.read(lambda db: runs.has_public(db, theirs.id))
    add_checkpoint(database, theirs, "one", is_public=True)
    assert database.read(lambda db: runs.has_public(db, theirs.id))
    seen, total = database.read(
        lambda db: runs.page(db, alice.id, limit=1, offset=0, with_public=True)
    )
    assert (seen, total) == ([theirs], 4)


def test_a_sampler_is_made_once_and_counts_its_clients(database: Database) -> None:
    session = add_session(database, add_tenant(database))
    sampler = add_sampler(database, session, model_path="tinker://r/weights/1")
    add_sampler(database, session, id=sampler.id, model_path="another")
    assert database.read(lambda db: samplers.find(db, sampler.id)) == sampler
    later = add_sampler(database, session, created_at=NOW + 1)
    assert database.read(lambda db: samplers.of_session(db, session.id)) == [sampler, later]
    assert [database.write(lambda db: samplers.join(db, sampler.id)) for _ in range(3)] == [1, 2, 3]
    assert database.read(lambda db: samplers.find(db, "nobody")) is None
