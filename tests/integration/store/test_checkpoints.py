"""Checkpoints: lookup, listing, publishing, counting and deletion."""

from __future__ import annotations

import itertools

import pytest
import sqlalchemy as sa

from tests.support.store_rows import (
    NOW,
    add_checkpoint,
    add_job,
    add_run,
    add_sampler,
    add_session,
    add_tenant,
    finish_job,
)
from tinkex.errors import StoreUnavailable
from tinkex.store import checkpoints, samplers, sessions
from tinkex.store.database import Database
from tinkex.store.records import CheckpointRecord, RunRecord, SamplerRecord


def _run(database: Database, tenant: str = "alice") -> RunRecord:
    return add_run(database, add_session(database, add_tenant(database, tenant)))


def _doomed(database: Database, now: float, limit: int = 100) -> set[str]:
    deletable = database.write(
        lambda db: checkpoints.collect_deletable(db, now, limit, ephemeral_seconds=60.0)
    )
    assert len(deletable) == len(set(deletable))
    return set(deletable)


def test_checkpoint_is_found_by_path_and_id(database: Database) -> None:
    saved = add_checkpoint(
        database,
        _run(database),
        "one",
        size_bytes=5_000_000_000,
        user_metadata={"k": "v"},
        expires_at=NOW + 10,
    )
    assert database.read(lambda db: checkpoints.find(db, saved.path, NOW)) == saved
    assert database.read(lambda db: checkpoints.find_by_id(db, saved.id, NOW)) == saved
    other = saved.path._replace(segment="sampler_weights")
    assert database.read(lambda db: checkpoints.find(db, other, NOW)) is None


def test_deleted_and_expired_checkpoints_are_not_found(database: Database) -> None:
    run = _run(database)
    short = add_checkpoint(database, run, "short", expires_at=NOW + 10)
    assert database.read(lambda db: checkpoints.find_by_id(db, short.id, NOW + 9)) == short
    assert database.read(lambda db: checkpoints.find_by_id(db, short.id, NOW + 10)) is None
    database.write(lambda db: checkpoints.set_expiry(db, short.id, None))
    assert database.read(lambda db: checkpoints.find(db, short.path, NOW + 10)) is not None
    assert database.write(lambda db: checkpoints.delete(db, short.id, NOW))
    assert not database.write(lambda db: checkpoints.delete(db, short.id, NOW))
    assert database.read(lambda db: checkpoints.find(db, short.path, NOW)) is None


def test_path_has_one_checkpoint(database: Database) -> None:
    run = _run(database)
    first = add_checkpoint(database, run, "one")
    with pytest.raises(StoreUnavailable, match="refused"):
        add_checkpoint(database, run, "one")
    database.write(lambda db: checkpoints.delete(db, first.id, NOW))
    second = add_checkpoint(database, run, "one")
    assert database.read(lambda db: checkpoints.find(db, first.path, NOW)) == second


def test_expired_checkpoint_frees_its_path(database: Database) -> None:
    run = _run(database)
    first = add_checkpoint(database, run, "one", expires_at=NOW + 1)
    second = add_checkpoint(database, run, "one", created_at=NOW + 2)
    assert database.read(lambda db: checkpoints.find(db, first.path, NOW + 2)) == second
    assert _doomed(database, NOW + 2) == {first.id}


def test_lists_are_newest_first_and_omit_hidden_checkpoints(database: Database) -> None:
    run, other = _run(database), _run(database, "bob")
    saved = [add_checkpoint(database, run, str(i), created_at=NOW + i) for i in range(4)]
    add_checkpoint(database, run, "ephemeral", is_ephemeral=True)
    add_checkpoint(database, run, "expired", expires_at=NOW - 1)
    add_checkpoint(database, run, "deleted", deleted_at=NOW)
    add_checkpoint(database, other, "of bob")
    newest_first = saved[::-1]
    assert database.read(lambda db: checkpoints.list_by_run(db, run.id, NOW)) == newest_first
    page, total = database.read(
        lambda db: checkpoints.list_page(db, run.tenant_id, limit=2, offset=1, now=NOW)
    )
    assert (page, total) == (newest_first[1:3], 4)


def test_newest_by_run_uses_one_query(database: Database) -> None:
    runs = [_run(database) for _ in range(3)]
    wanted: dict[tuple[str, str], CheckpointRecord] = {}
    for run, segment in itertools.product(runs[:2], ("weights", "sampler_weights")):
        for at in (2, 3, 1):
            saved = add_checkpoint(database, run, str(at), segment=segment, created_at=NOW + at)
            if at == 3:
                wanted[run.id, segment] = saved
        add_checkpoint(database, run, "e", segment=segment, created_at=NOW + 9, is_ephemeral=True)
    asked: list[str] = []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *args: asked.append(args[2]))
    ids = [run.id for run in runs]
    assert database.read(lambda db: checkpoints.newest_by_run(db, ids, NOW + 10)) == wanted
    assert len(asked) == 1
    assert database.read(lambda db: checkpoints.newest_by_run(db, [], NOW)) == {}


def test_publishing_twice_changes_nothing(database: Database) -> None:
    saved = add_checkpoint(database, _run(database), "one")
    assert database.write(lambda db: checkpoints.set_public(db, saved.id, True))
    assert not database.write(lambda db: checkpoints.set_public(db, saved.id, True))
    checkpoint = database.read(lambda db: checkpoints.find_by_id(db, saved.id, NOW))
    assert checkpoint is not None
    assert checkpoint.is_public
    assert database.write(lambda db: checkpoints.set_public(db, saved.id, False))


def test_storage_is_counted_per_project(database: Database) -> None:
    run = _run(database)
    tenant_id = run.tenant_id
    add_checkpoint(database, run, "1", project_id="a", size_bytes=1)
    add_checkpoint(database, run, "2", project_id="a", size_bytes=4_000_000_000)
    add_checkpoint(database, run, "3", project_id="b", size_bytes=7)
    add_checkpoint(database, run, "4", project_id="b", is_ephemeral=True)
    add_checkpoint(database, run, "5", project_id="b", expires_at=NOW)
    add_checkpoint(database, _run(database, "bob"), "6", project_id="a")
    every = database.read(lambda db: checkpoints.storage_by_project(db, tenant_id, None, NOW))
    assert every == [("a", 2, 4_000_000_001), ("b", 1, 7)]
    assert database.read(lambda db: checkpoints.storage_by_project(db, tenant_id, "b", NOW)) == [
        ("b", 1, 7)
    ]


def test_list_deletable_includes_deleted_expired_and_orphaned(database: Database) -> None:
    tenant = add_tenant(database)
    active, ended, lost = (add_session(database, tenant) for _ in range(3))
    database.write(lambda db: sessions.finish(db, ended.id, "success", None, NOW))
    database.write(lambda db: sessions.touch(db, active.id, NOW + 1000))
    database.write(lambda db: sessions.expire_unseen(db, unseen_since=NOW + 1, now=NOW + 30))
    kept = add_checkpoint(database, add_run(database, ended), "kept")
    deleted = add_checkpoint(database, add_run(database, active), "d", deleted_at=NOW)
    expired = add_checkpoint(database, add_run(database, active), "e", expires_at=NOW + 5)
    in_use, orphan, later = (
        add_checkpoint(database, add_run(database, session), "x", is_ephemeral=True)
        for session in (active, ended, lost)
    )
    assert _doomed(database, NOW) == {deleted.id}
    assert _doomed(database, NOW + 60) == {deleted.id, expired.id, orphan.id}
    assert database.read(lambda db: checkpoints.find_by_id(db, orphan.id, NOW + 60)) is None
    assert _doomed(database, NOW + 90, limit=2) <= {deleted.id, expired.id, orphan.id}
    assert _doomed(database, NOW + 90) == {deleted.id, expired.id, orphan.id, later.id}
    for checkpoint_id in (deleted.id, expired.id, orphan.id, later.id):
        database.write(lambda db, known=checkpoint_id: checkpoints.delete_row(db, known))
    assert _doomed(database, NOW + 90) == set()
    assert database.read(checkpoints.list_ids) == {kept.id, in_use.id}


# --- unnamed sampler weights ---------------------------------------------------------------------


def _unnamed(
    database: Database, run: RunRecord, count: int
) -> list[tuple[CheckpointRecord, SamplerRecord]]:
    """Add unnamed sampler weights, oldest first, each with a sampling session."""
    session = database.read(lambda db: sessions.find(db, run.session_id))
    assert session is not None
    deletable = []
    for number in range(count):
        saved = add_checkpoint(
            database,
            run,
            f".session-{number}",
            segment="sampler_weights",
            is_ephemeral=True,
            created_at=NOW + number,
        )
        deletable.append((saved, add_sampler(database, session, checkpoint_id=saved.id)))
    return deletable


def _left(database: Database, made: list[tuple[CheckpointRecord, SamplerRecord]]) -> list[int]:
    return [
        number
        for number, (saved, _) in enumerate(made)
        if database.read(lambda db, saved=saved: checkpoints.find_by_id(db, saved.id, NOW))
        is not None
    ]


def test_most_recently_used_unnamed_weights_are_kept(database: Database) -> None:
    run = _run(database)
    named = add_checkpoint(database, run, "named", segment="sampler_weights")
    other = _unnamed(database, _run(database, "bob"), 4)
    unnamed = _unnamed(database, run, 6)
    database.write(lambda db: samplers.touch(db, unnamed[1][1].id, NOW + 50))
    assert database.write(lambda db: checkpoints.delete_surplus_unnamed(db, run.id, 3, NOW)) == 3
    assert _left(database, unnamed) == [1, 4, 5]
    assert _left(database, other) == [0, 1, 2, 3]
    assert database.read(lambda db: checkpoints.find_by_id(db, named.id, NOW)) == named
    assert _doomed(database, NOW) == {unnamed[number][0].id for number in (0, 2, 3)}


def test_unnamed_weights_with_pending_samples_are_kept(database: Database) -> None:
    run = _run(database)
    unnamed = _unnamed(database, run, 5)
    session = database.read(lambda db: sessions.find(db, run.session_id))
    assert session is not None
    job = add_job(database, session, sampler_id=unnamed[0][1].id)
    database.write(lambda db: checkpoints.delete_surplus_unnamed(db, run.id, 2, NOW))
    assert _left(database, unnamed) == [0, 3, 4]
    # Even after the end of the session they stay while a sample is pending.
    database.write(lambda db: sessions.finish(db, session.id, "success", None, NOW))
    deleted = {unnamed[number][0].id for number in (1, 2, 3, 4)}
    assert _doomed(database, NOW + 61) == deleted
    finish_job(database, job)
    assert _doomed(database, NOW + 61) == deleted | {unnamed[0][0].id}
