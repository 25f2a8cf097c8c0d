from __future__ import annotations

from tests.support.store_rows import (
    NOW,
    add_job,
    add_run,
    add_session,
    add_tenant,
    finish_job,
    make_step,
    new_job,
)
from tinkex.store import jobs, keys, stats, steps
from tinkex.store.database import Connection, Database
from tinkex.store.stats import OpenJobs


def test_open_jobs_are_counted_by_kind_per_tenant(database: Database) -> None:
    alice, bob = add_tenant(database), add_tenant(database, "bob")
    session, other = add_session(database, alice), add_session(database, bob)
    samples = [add_job(database, session, kind="asample") for _ in range(3)]
    add_job(database, session, kind="optim_step")
    add_job(database, other, kind="asample")
    finish_job(database, samples[0])
    database.write(lambda db: jobs.mark_started(db, [samples[1].id], NOW))

    assert database.read(lambda db: stats.open_jobs_by_kind(db, alice.id)) == [
        OpenJobs("asample", 1, 1, NOW),
        OpenJobs("optim_step", 1, 0, NOW),
    ]
    assert database.read(lambda db: stats.open_jobs_by_kind(db, "nobody")) == []


def test_longest_waiting_jobs_come_first(database: Database) -> None:
    session = add_session(database, add_tenant(database))

    def work(db: Connection) -> None:
        for kind, age in (("asample", 5.0), ("optim_step", 9.0), ("asample", 1.0)):
            jobs.insert(db, new_job(session, kind=kind), NOW - age)

    database.write(work)

    open_jobs = database.read(lambda db: stats.open_jobs_by_kind(db, session.tenant_id))
    assert [(line.kind, line.oldest_at) for line in open_jobs] == [
        ("optim_step", NOW - 9.0),
        ("asample", NOW - 5.0),
    ]


def test_oldest_step_is_the_first_stored_one(database: Database) -> None:
    session = add_session(database, add_tenant(database))
    run, idle = add_run(database, session), add_run(database, session)
    for _ in range(3):
        database.write(lambda db: steps.insert(db, make_step(session, run_id=run.id)))

    numbers = [no for no, _ in database.read(lambda db: steps.list_by_run(db, run.id, limit=10))]
    assert database.read(lambda db: stats.oldest_step_no(db, run.id)) == numbers[0]
    assert database.read(lambda db: stats.oldest_step_no(db, idle.id)) is None


def test_tenant_is_found_by_name(database: Database) -> None:
    tenant = add_tenant(database)

    assert database.read(lambda db: keys.find_tenant_by_name(db, "alice")) == tenant
    assert database.read(lambda db: keys.find_tenant_by_name(db, "unknown")) is None
