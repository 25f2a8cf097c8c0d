"""Search of checkpoints: conditions, owners and pages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.store_rows import NOW, add_checkpoint, add_run, add_session, add_tenant
from tinkex import types
from tinkex.store import checkpoint_search, checkpoints
from tinkex.store.database import Database
from tinkex.store.records import RunRecord

URN = "urn:alice"


def make_run(database: Database, tenant: str = "alice") -> RunRecord:
    return add_run(database, add_session(database, add_tenant(database, tenant)))


def search(
    database: Database, tenant_id: str, now: float = NOW, **fields: Any
) -> checkpoint_search.CheckpointSearchPage:
    request = types.CheckpointSearchRequest(**fields)
    return database.read(lambda db: checkpoint_search.search(db, tenant_id, URN, request, now))


def names(page: checkpoint_search.CheckpointSearchPage) -> list[str]:
    return [checkpoint.name for checkpoint in page.checkpoints]


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        ({}, ["d", "c", "b", "a"]),
        ({"base_models": ["one"]}, ["b", "a"]),
        ({"base_models": ["one", "two"]}, ["c", "b", "a"]),
        ({"base_models": []}, []),
        ({"project_ids": ["blue"]}, ["d", "b"]),
        ({"project_ids": []}, []),
        ({"checkpoint_type": "sampler"}, ["b"]),
        ({"checkpoint_type": "external"}, ["c"]),
        ({"user_metadata": {"k": "v"}}, ["c", "a"]),
        ({"user_metadata": {"k": "v", "l": "w"}}, ["c"]),
        ({"user_metadata": {"k": "V"}}, []),
        ({"user_metadata": {"k": "v"}, "base_models": ["one"]}, ["a"]),
    ],
)
def test_all_conditions_must_match(
    database: Database, conditions: dict[str, Any], found: list[str]
) -> None:
    run = make_run(database)
    both = {"k": "v", "l": "w"}
    add_checkpoint(database, run, "a", base_model="one", user_metadata={"k": "v"})
    add_checkpoint(
        database,
        run,
        "b",
        base_model="one",
        segment="sampler_weights",
        project_id="blue",
        created_at=NOW + 1,
    )
    add_checkpoint(
        database,
        run,
        "c",
        base_model="two",
        segment="external_weights",
        user_metadata=both,
        created_at=NOW + 2,
    )
    add_checkpoint(database, run, "d", base_model="three", project_id="blue", created_at=NOW + 3)
    assert names(search(database, run.tenant_id, **conditions)) == found


def test_search_returns_only_own_listed_checkpoints(database: Database) -> None:
    run, other = make_run(database), make_run(database, "bob")
    add_checkpoint(database, run, "own")
    add_checkpoint(database, run, "ephemeral", is_ephemeral=True)
    add_checkpoint(database, run, "expired", expires_at=NOW)
    deleted = add_checkpoint(database, run, "deleted")
    database.write(lambda db: checkpoints.delete(db, deleted.id, NOW))
    add_checkpoint(database, other, "public", is_public=True)
    for owner, found in (
        (types.OwnSearchOwner(), ["own"]),
        (types.AccessibleSearchOwner(), ["own"]),
        (types.UserSearchOwner(owner_urns=["urn:x", URN]), ["own"]),
        (types.UserSearchOwner(owner_urns=["urn:x"]), []),
    ):
        assert names(search(database, run.tenant_id, owner=owner)) == found


def test_pages_have_every_checkpoint_once(database: Database) -> None:
    run = make_run(database)
    # Equal times and times that a cursor rounds: the ids decide.
    times = [NOW, NOW, NOW, NOW + 1e-7, NOW + 2e-7, NOW + 1]
    for number, created_at in enumerate(times):
        add_checkpoint(database, run, str(number), created_at=created_at)
    everything = names(search(database, run.tenant_id))
    assert len(everything) == 6
    paged: list[str] = []
    cursor = None
    for _ in range(4):
        page = search(database, run.tenant_id, limit=2, cursor=cursor)
        paged += names(page)
        cursor = page.next_cursor
        if cursor is None:
            break
    assert paged == everything
    assert cursor is None


def test_cursor_of_another_tenant_reveals_nothing(database: Database) -> None:
    run, other = make_run(database), make_run(database, "bob")
    add_checkpoint(database, run, "own", created_at=NOW)
    theirs = add_checkpoint(database, other, "theirs", created_at=NOW - 100)
    cursor = types.CheckpointSearchCursor(
        last_created_at="2999-01-01T00:00:00Z", last_checkpoint_uuid=theirs.id
    )
    # The time of their checkpoint is not used: it would hide this newer one.
    assert names(search(database, run.tenant_id, cursor=cursor)) == ["own"]
