"""Runs and samplers: lookup, listing and visibility."""

from __future__ import annotations

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
from tinkex.store import jobs, runs, samplers, schema, sessions
from tinkex.store.database import Database
from tinkex.store.records import RunState


def test_run_round_trip(database: Database) -> None:
    session = add_session(database, add_tenant(database))
    run = add_run(database, session, spec={"rank": 8, "seed": None}, user_metadata={"a": "b"})
    assert database.read(lambda db: runs.find(db, run.id)) == run
    finish_job(database, add_job(database, session, run_id=run.id), finished_at=NOW + 5)
    stored = database.read(lambda db: runs.find(db, run.id))
    assert stored is not None
    assert stored.used_at == NOW + 5
    assert database.read(lambda db: runs.list_by_session(db, session.id)) == [stored]


def test_pages_are_newest_first_with_total(database: Database) -> None:
    alice, bob = add_tenant(database, "alice"), add_tenant(database, "bob")
    own_session = add_session(database, alice, project_id="p")
    own_runs = [add_run(database, own_session, created_at=NOW + i) for i in range(3)]
    other_run = add_run(database, add_session(database, bob), created_at=NOW + 9)
    page = database.read(lambda db: runs.list_page(db, alice.id, limit=2, offset=0))
    assert page == ([own_runs[2], own_runs[1]], 3)
    in_project = database.read(
        lambda db: runs.list_page(db, alice.id, limit=9, offset=0, project_id="other")
    )
    assert in_project == ([], 0)

    add_checkpoint(database, other_run, "one", is_public=True)
    seen, total = database.read(
        lambda db: runs.list_page(db, alice.id, limit=1, offset=0, with_public=True)
    )
    assert (seen, total) == ([other_run], 4)


def test_runs_are_found_by_name_and_tag_and_sorted(database: Database) -> None:
    tenant = add_tenant(database)
    tagged = add_run(database, add_session(database, tenant, tags=["Grün"]), num_steps=2)
    named = add_run(database, add_session(database, tenant), user_metadata={"name": "Pirate"})
    database.write(lambda db: runs.set_tags(db, named, ["50% off", "größer"]))
    database.write(lambda db: runs.set_tags(db, tagged, []))

    def listed(search: str | None = None, sort: str = "steps") -> list[str]:
        page, _ = database.read(
            lambda db: runs.list_page(db, tenant.id, limit=9, offset=0, search=search, sort=sort)
        )
        return [run.id for run in page]

    assert listed("pirat") == [named.id]
    assert listed("größer") == [named.id]
    assert listed("50%") == [named.id]
    assert listed("5%off") == []
    assert listed("Grün") == [tagged.id]
    assert listed(sort="-steps") == [tagged.id, named.id]
    assert listed(sort="-name")[0] == named.id
    stored = database.read(lambda db: runs.find(db, named.id))
    assert stored is not None
    assert stored.user_metadata == {"name": "Pirate", "tags": ["50% off", "größer"]}


def test_sampler_is_inserted_once_and_counts_clones(database: Database) -> None:
    session = add_session(database, add_tenant(database))
    sampler = add_sampler(database, session, model_path="tinker://r/weights/1")
    add_sampler(database, session, id=sampler.id, model_path="another")
    assert database.read(lambda db: samplers.find(db, sampler.id)) == sampler
    later = add_sampler(database, session, created_at=NOW + 1)
    assert database.read(lambda db: samplers.list_by_session(db, session.id)) == [sampler, later]
    assert [database.write(lambda db: samplers.add_clone(db, sampler.id)) for _ in range(3)] == [
        1,
        2,
        3,
    ]
    assert database.read(lambda db: samplers.find(db, "nobody")) is None


def test_unused_models_are_unloaded(database: Database) -> None:
    tenant = add_tenant(database)
    done, lost, live = (add_session(database, tenant) for _ in range(3))
    models = [add_run(database, session) for session in (done, lost, live)]
    for run in models:
        database.write(lambda db, run=run: runs.set_snapshot(db, run.id, f"{run.id}-1", 1))
    database.write(lambda db: sessions.finish(db, done.id, "success", None, NOW))
    database.write(lambda db: db.execute(_expired_at(lost.id, NOW)))

    def release(seconds: float) -> list[str]:
        database.write(
            lambda db: runs.unload_unused(
                db, finished_before=NOW + seconds, expired_before=NOW + seconds - 10
            )
        )
        return database.write(runs.clear_unloaded)

    assert release(0.0) == []
    assert release(1.0) == [f"{models[0].id}-1"]
    assert release(11.0) == [f"{models[1].id}-1"]
    assert release(99.0) == []
    states = [database.read(lambda db, run=run: runs.find(db, run.id)).state for run in models]
    assert states[:2] == [RunState.UNLOADED] * 2
    assert states[2] != RunState.UNLOADED


def test_model_with_open_jobs_is_not_unloaded(database: Database) -> None:
    session = add_session(database, add_tenant(database))
    run = add_run(database, session)
    job = add_job(database, session, run_id=run.id)
    database.write(lambda db: sessions.finish(db, session.id, "success", None, NOW))

    def state() -> str:
        database.write(
            lambda db: runs.unload_unused(db, finished_before=NOW + 1, expired_before=NOW)
        )
        stored = database.read(lambda db: runs.find(db, run.id))
        assert stored is not None
        return stored.state

    assert state() == RunState.READY
    finish_job(database, job)
    assert state() == RunState.UNLOADED


def _expired_at(session_id: str, at: float) -> sa.Update:
    table = schema.sessions
    return sa.update(table).where(table.c.id == session_id).values(expired_at=at)


def test_unloaded_runs_lose_snapshot_and_payloads(database: Database) -> None:
    session = add_session(database, add_tenant(database))
    left, stays = (add_run(database, session) for _ in range(2))
    for run in (left, stays):
        for place in (1, 2):
            job = add_job(database, session, run_id=run.id, payload=b"data")
            finish_job(database, job, applied=place)
        database.write(lambda db, run=run: runs.set_snapshot(db, run.id, f"of-{run.id}", 1))
    database.write(lambda db: runs.set_state(db, left.id, RunState.UNLOADED))
    assert database.write(runs.clear_unloaded) == [f"of-{left.id}"]
    assert database.write(runs.clear_unloaded) == []
    assert database.read(runs.list_snapshots) == {f"of-{stays.id}"}
    for run, payloads in ((left, [None]), (stays, [b"data"])):
        changes = database.read(lambda db, run=run: jobs.list_changes_after(db, run.id, 1, limit=9))
        assert [payload for _, payload in changes] == payloads
