"""Sessions: heartbeats, expiry, paging and search."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.store_rows import NOW, add_checkpoint, add_run, add_session, add_tenant
from tinkex import types
from tinkex.store import checkpoints, sessions
from tinkex.store.database import Database
from tinkex.store.records import SessionRecord, TenantRecord

URN = "urn:alice"


def _find(database: Database, session: SessionRecord) -> SessionRecord:
    stored = database.read(lambda db: sessions.find(db, session.id))
    assert stored is not None
    return stored


def _search(database: Database, tenant: TenantRecord, **fields: Any) -> sessions.SessionSearchPage:
    request = types.SessionSearchRequest(**fields)
    return database.read(lambda db: sessions.search(db, tenant.id, URN, request))


def _ids(found: sessions.SessionSearchPage) -> list[str]:
    return [facts.session.id for facts in found.sessions]


def test_session_round_trip(database: Database) -> None:
    tenant = add_tenant(database)
    session = add_session(
        database, tenant, display_name="Ünï", tags=["a", "b"], user_metadata={"k": [1, {"x": None}]}
    )
    assert _find(database, session) == session
    assert database.read(lambda db: sessions.find(db, "nobody")) is None


def test_session_expires_without_heartbeat(database: Database) -> None:
    tenant = add_tenant(database)
    silent, heard, done = (add_session(database, tenant) for _ in range(3))
    database.write(lambda db: sessions.touch(db, heard.id, NOW + 50))
    database.write(lambda db: sessions.finish(db, done.id, "success", None, NOW + 1))

    def expire(db: sa.Connection) -> int:
        return sessions.expire_unseen(db, unseen_since=NOW + 10, now=NOW + 60)

    assert database.write(expire) == 1
    assert database.write(expire) == 0
    assert _find(database, silent).expired_at == NOW + 60
    assert _find(database, heard).seen_at == NOW + 50
    database.write(lambda db: sessions.touch(db, silent.id, NOW + 70))
    assert _find(database, silent).expired_at is None


def test_first_finish_reason_is_kept(database: Database) -> None:
    session = add_session(database, add_tenant(database))
    database.write(lambda db: sessions.finish(db, session.id, "errored", "boom", NOW + 1))
    database.write(lambda db: sessions.finish(db, session.id, "success", None, NOW + 2))
    stored = _find(database, session)
    ended = (stored.finish_reason, stored.finish_detail, stored.finished_at)
    assert ended == ("errored", "boom", NOW + 1)


def test_pages_are_newest_first_and_of_one_tenant(database: Database) -> None:
    alice, bob = add_tenant(database, "alice"), add_tenant(database, "bob")
    add_session(database, bob)
    ids = [add_session(database, alice, created_at=NOW + i).id for i in range(5)]
    page = database.read(lambda db: sessions.list_ids(db, alice.id, limit=3, offset=1))
    assert page == [ids[3], ids[2], ids[1]]


def test_assign_project_moves_session_and_checkpoints(database: Database) -> None:
    session = add_session(database, add_tenant(database))
    saved = add_checkpoint(database, add_run(database, session), "one")
    database.write(lambda db: sessions.assign_project(db, session.id, "other"))
    assert _find(database, session).project_id == "other"
    moved = database.read(lambda db: checkpoints.find_by_id(db, saved.id, NOW))
    assert moved is not None
    assert moved.project_id == "other"


# --- the search ------------------------------------------------------------------------------
def test_search_returns_only_own_sessions(database: Database) -> None:
    alice, bob = add_tenant(database, "alice"), add_tenant(database, "bob")
    own = add_session(database, alice)
    add_session(database, bob)
    for owner, found in (
        (types.OwnSearchOwner(), [own.id]),
        (types.AccessibleSearchOwner(), [own.id]),
        (types.UserSearchOwner(owner_urns=["urn:x", URN]), [own.id]),
        (types.UserSearchOwner(owner_urns=["urn:x"]), []),
    ):
        assert _ids(_search(database, alice, owner=owner)) == found


def test_search_by_projects(database: Database) -> None:
    tenant = add_tenant(database)
    ids = {name: add_session(database, tenant, project_id=name).id for name in "abc"}
    assert set(_ids(_search(database, tenant, project_ids=["a", "c"]))) == {ids["a"], ids["c"]}
    assert _ids(_search(database, tenant, project_ids=[])) == []


@pytest.mark.parametrize("key", ["k", "", 'a"b', "a.b", "$", "[0]", "a\\b", "ünï 🎈", "%", "'"])
def test_metadata_is_compared_exactly_for_any_key(database: Database, key: str) -> None:
    tenant = add_tenant(database)
    good = add_session(database, tenant, user_metadata={key: "v", "other": "w"})
    for other in ({key: "V"}, {key + "x": "v"}, {"x": {key: "v"}}, {key: ["v"]}, {key: 1}, {}):
        add_session(database, tenant, user_metadata=other)
    assert _ids(_search(database, tenant, user_metadata={key: "v"})) == [good.id]
    assert _ids(_search(database, tenant, user_metadata={key: "v", "other": "w"})) == [good.id]
    assert _ids(_search(database, tenant, user_metadata={key: "v", "other": "x"})) == []


def test_metadata_number_does_not_match_text(database: Database) -> None:
    tenant = add_tenant(database)
    add_session(database, tenant, user_metadata={"k": 1})
    add_session(database, tenant, user_metadata={"k": True})
    assert _ids(_search(database, tenant, user_metadata={"k": "1"})) == []


def test_search_matches_id_or_name(database: Database) -> None:
    tenant = add_tenant(database)
    named = add_session(database, tenant, display_name="ÄRGER with 100%_A", created_at=NOW + 2)
    other = add_session(database, tenant, display_name="calm", created_at=NOW + 1)
    add_session(database, tenant)
    assert _ids(_search(database, tenant, display_name="with ärger")) == [named.id]
    assert _ids(_search(database, tenant, display_name="100%_a")) == [named.id]
    assert _ids(_search(database, tenant, display_name="1_0")) == []
    assert _ids(_search(database, tenant, session_id=other.id)) == [other.id]
    both = _search(database, tenant, session_id=other.id, display_name="ärger")
    assert _ids(both) == [named.id, other.id]
    assert len(_ids(_search(database, tenant, display_name="  "))) == 3


def test_search_by_status(database: Database) -> None:
    tenant = add_tenant(database)
    active = add_session(database, tenant)
    lost = add_session(database, tenant, expired_at=NOW)
    good = add_session(database, tenant, finished_at=NOW, finish_reason="success")
    bad = add_session(
        database, tenant, finished_at=NOW, finish_reason="errored", expired_at=NOW - 1
    )

    def in_state(*queries: types.SessionStatusQuery) -> set[str]:
        return set(_ids(_search(database, tenant, statuses=list(queries))))

    finished = types.ClientFinishedSessionStatusQuery
    assert in_state(types.ActiveSessionStatusQuery()) == {active.id}
    assert in_state(types.CancelledSessionStatusQuery()) == {lost.id}
    assert in_state(types.FailedSessionStatusQuery()) == set()
    assert in_state(finished()) == {good.id, bad.id}
    assert in_state(finished(reasons=["errored", "interrupted"])) == {bad.id}
    assert in_state(types.ActiveSessionStatusQuery(), finished(reasons=["success"])) == {
        active.id,
        good.id,
    }


def test_search_pages_are_complete_without_duplicates(database: Database) -> None:
    tenant = add_tenant(database)
    # Times that differ by less than the precision of a cursor, and equal times.
    times = [NOW + step * 2.5e-7 for step in range(8)] + [NOW + 5] * 4
    inserted = [add_session(database, tenant, created_at=at) for at in times]
    wanted = [s.id for s in sorted(inserted, key=lambda s: (s.created_at, s.id), reverse=True)]
    seen: list[str] = []
    cursor = None
    for _ in range(len(inserted)):
        page = _search(database, tenant, limit=3, cursor=cursor)
        seen += _ids(page)
        if (cursor := page.next_cursor) is None:
            break
    assert seen == wanted


def test_search_counts_remaining_checkpoints(database: Database) -> None:
    tenant = add_tenant(database)
    session, empty = (
        add_session(database, tenant, created_at=NOW + 1),
        add_session(database, tenant),
    )
    run = add_run(database, session)
    add_checkpoint(database, run, "a", size_bytes=10)
    add_checkpoint(database, run, "b", size_bytes=5_000_000_000)
    add_checkpoint(database, run, "c", is_ephemeral=True)
    add_checkpoint(database, run, "d", deleted_at=NOW)
    results = _search(database, tenant).sessions
    assert [facts[1:] for facts in results] == [(2, 5_000_000_010), (0, 0)]
    assert results[1].session.id == empty.id


def test_search_uses_two_queries_per_page(database: Database) -> None:
    tenant = add_tenant(database)
    for _ in range(20):
        add_checkpoint(database, add_run(database, add_session(database, tenant)), "a")
    asked: list[str] = []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *args: asked.append(args[2]))
    assert len(_search(database, tenant).sessions) == 20
    assert len(asked) == 2
