"""Retention: what is deleted, what is kept, and that the store stops growing."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.store_rows import (
    NOW,
    add_job,
    add_run,
    add_sampler,
    add_session,
    add_tenant,
    count,
    ending,
    finish_job,
    make_step,
    new_job,
)
from tinkex.store import accounting, idempotency, jobs, retention, runs, schema, steps
from tinkex.store.database import Database
from tinkex.store.records import AuditRecord, JobRecord, SessionRecord
from tinkex.store.retention import RetentionPolicy, SweepResult

DAY = 86_400.0


@pytest.fixture
def session(database: Database) -> SessionRecord:
    return add_session(database, add_tenant(database))


def _sweep(database: Database, now: float, limit: int = 2000, **changes: float) -> SweepResult:
    policy = RetentionPolicy(**changes)  # type: ignore[arg-type]
    return database.write(lambda db: retention.sweep(db, policy, now, limit))


def _fetch(database: Database, *fetched: JobRecord, now: float = NOW) -> None:
    ids = [job.id for job in fetched]
    database.write(lambda db: jobs.mark_fetched(db, ids, now))


def _remaining(database: Database) -> set[str]:
    return database.read(lambda db: set(db.scalars(sa.select(schema.jobs.c.id))))


def test_fetched_results_expire_sooner_than_unfetched_ones(
    database: Database, session: SessionRecord
) -> None:
    fetched, unfetched, waiting, running = (add_job(database, session) for _ in range(4))
    for job in (fetched, unfetched):
        finish_job(database, job)
    _fetch(database, fetched)
    database.write(lambda db: jobs.mark_started(db, [running.id], NOW))
    assert _sweep(database, NOW + 599).num_jobs == 0
    assert _sweep(database, NOW + 600).num_jobs == 1
    assert _remaining(database) == {unfetched.id, waiting.id, running.id}
    assert _sweep(database, NOW + DAY - 1).num_jobs == 0
    assert _sweep(database, NOW + DAY).num_jobs == 1
    assert _sweep(database, NOW + 1000 * DAY).num_jobs == 0
    assert _remaining(database) == {waiting.id, running.id}


def test_number_of_fetched_results_is_limited(database: Database, session: SessionRecord) -> None:
    added = [add_job(database, session) for _ in range(6)]
    for place, job in enumerate(added):
        finish_job(database, job)
        _fetch(database, job, now=NOW + place // 3)
    swept = _sweep(database, NOW + 2, max_fetched=2)
    assert swept.num_jobs == 4
    assert _remaining(database) == {added[4].id, added[5].id}


def test_change_without_snapshot_keeps_its_payload(
    database: Database, session: SessionRecord
) -> None:
    run = add_run(database, session)
    added = [add_job(database, session, run_id=run.id, payload=bytes([i])) for i in range(4)]
    for place, job in enumerate(added[:3], start=1):
        finish_job(database, job, applied=place)
    finish_job(database, added[3])
    _fetch(database, added[0], added[3])
    database.write(lambda db: runs.set_snapshot(db, run.id, "somewhere", 1))
    swept = _sweep(database, NOW + 10 * DAY)
    assert (swept.num_jobs, swept.num_results) == (2, 2)
    changes = database.read(lambda db: jobs.list_changes_after(db, run.id, 1, limit=9))
    assert [(job.id, payload) for job, payload in changes] == [
        (added[1].id, b"\x01"),
        (added[2].id, b"\x02"),
    ]
    outcome = database.read(lambda db: jobs.find_with_result(db, added[1].id))
    assert outcome is not None
    assert outcome.result is None
    assert _sweep(database, NOW + 10 * DAY) == SweepResult()

    database.write(lambda db: runs.set_snapshot(db, run.id, "further", 3))
    assert _sweep(database, NOW + 10 * DAY).num_jobs == 2
    assert _remaining(database) == set()


def test_jobs_needed_for_replay_do_not_block_deletion_of_others(
    database: Database, session: SessionRecord
) -> None:
    run = add_run(database, session)
    for place in range(1, 6):
        job = add_job(database, session, run_id=run.id)
        finish_job(database, job, applied=place)
        _fetch(database, job)
    other = add_job(database, session)
    finish_job(database, other)
    _fetch(database, other, now=NOW + 1)
    assert _sweep(database, NOW + DAY, limit=2).num_jobs == 1
    assert other.id not in _remaining(database)


def test_completions_expire_and_are_deleted_with_their_jobs(
    database: Database, session: SessionRecord
) -> None:
    sampler = add_sampler(database, session)
    added = [add_job(database, session, sampler_id=sampler.id, position=i) for i in range(2)]
    for job in added:
        finish_job(database, job)
    _fetch(database, added[0])
    _sweep(database, NOW + 600)
    assert count(database, schema.completions) == 1
    assert _sweep(database, NOW + DAY, unfetched_seconds=9 * DAY).num_completions == 1
    assert count(database, schema.completions) == 0


def test_newest_steps_of_each_session_are_kept(database: Database, session: SessionRecord) -> None:
    other = add_session(database, add_tenant(database))

    def insert(db: sa.Connection) -> None:
        for _ in range(25):
            steps.insert(db, make_step(session))
        for _ in range(3):
            steps.insert(db, make_step(other))

    database.write(insert)
    newest = database.read(lambda db: steps.list_by_session(db, session.id, limit=10))
    first = _sweep(database, NOW, limit=12, steps_per_session=10)
    assert (first.num_steps, first.has_more) == (12, True)
    second = _sweep(database, NOW, limit=12, steps_per_session=10)
    assert (second.num_steps, second.has_more) == (3, False)
    assert database.read(lambda db: steps.list_by_session(db, session.id, limit=99)) == newest
    assert len(database.read(lambda db: steps.list_by_session(db, other.id, limit=99))) == 3


def test_old_steps_are_deleted_in_batches(database: Database, session: SessionRecord) -> None:
    for day in range(4):
        step = make_step(session, finished_at=NOW + day * DAY)
        database.write(lambda db, step=step: steps.insert(db, step))
    assert _sweep(database, NOW + 89 * DAY).num_steps == 0
    assert _sweep(database, NOW + 92 * DAY, limit=2).num_steps == 2
    assert _sweep(database, NOW + 92 * DAY, limit=2).num_steps == 1
    assert count(database, schema.steps) == 1
    assert _sweep(database, NOW + 3 * DAY + 60, steps_seconds=60).num_steps == 1


def test_old_idempotency_and_audit_rows_are_deleted(database: Database) -> None:
    for age in (0, 2, 500):
        at = NOW - age * DAY
        entry = AuditRecord(tenant_id="t", at=at, event="e", details={})
        database.write(lambda db, entry=entry: accounting.insert_audit(db, entry))
        database.write(
            lambda db, at=at: idempotency.save_response(db, "t", "e", f"key {at}", "answer", at)
        )
    swept = _sweep(database, NOW)
    assert (swept.num_repeats, swept.num_audit) == (2, 1)
    assert count(database, schema.repeats) == 1
    assert count(database, schema.audit) == 2


def test_sweep_is_limited_and_reports_remaining_rows(
    database: Database, session: SessionRecord
) -> None:
    for _ in range(7):
        finish_job(database, add_job(database, session))
    bites = [_sweep(database, NOW + DAY, limit=3) for _ in range(3)]
    assert [bite.num_jobs for bite in bites] == [3, 3, 1]
    assert [bite.has_more for bite in bites] == [True, True, False]


def _push(
    db: sa.Connection, session: SessionRecord, sampler_id: str, first: int, size: int
) -> None:
    """Submit, finish and fetch many jobs in one transaction."""
    now = NOW + first
    ids = []
    for place in range(first, first + size):
        new = new_job(session, sampler_id=sampler_id, position=place, payload=b"p" * 300)
        job = jobs.insert(db, new, now)
        assert job is not None
        jobs.finish(db, ending(job, result=b"r" * 2000, finished_at=now))
        steps.insert(db, make_step(session, job_id=job.id))
        ids.append(job.id)
    jobs.mark_fetched(db, ids, now)


def _file_bytes(database: Database) -> int:
    path = Path(str(database.engine.url.database))
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def test_rows_and_file_size_are_bounded(database: Database, session: SessionRecord) -> None:
    sampler = add_sampler(database, session)
    policy = RetentionPolicy(fetched_seconds=DAY, max_fetched=500, steps_per_session=500)
    rows, sizes = [], []
    # Fewer jobs on PostgreSQL, where every statement is a round trip.
    num_jobs = 5000 if database.is_sqlite else 1000
    for first in range(0, num_jobs, 250):
        database.write(lambda db, first=first: _push(db, session, sampler.id, first, 250))
        while database.write(
            lambda db, now=NOW + first: retention.sweep(db, policy, now, 250)
        ).has_more:
            pass
        rows.append(
            tuple(
                count(database, table) for table in (schema.jobs, schema.steps, schema.completions)
            )
        )
        if database.is_sqlite:
            retention.vacuum(database)
            sizes.append(_file_bytes(database))
    assert set(rows[2:]) == {(500, 500, 500)}
    if database.is_sqlite:
        # The size of the log varies; it must not be larger at the end.
        assert max(sizes[10:]) <= 1.1 * max(sizes[:10])


def test_free_pages_are_vacuumed(database: Database, session: SessionRecord) -> None:
    def insert(db: sa.Connection) -> None:
        for _ in range(500):
            job = jobs.insert(db, new_job(session, payload=b"p" * 20_000), NOW)
            assert job is not None

    database.write(insert)
    database.write(lambda db: db.exec_driver_sql("DELETE FROM jobs"))
    before = _file_bytes(database) if database.is_sqlite else 0
    freed = retention.vacuum(database)
    if not database.is_sqlite:
        assert freed == 0
        return
    assert freed > 2000
    assert database.read(lambda db: db.exec_driver_sql("PRAGMA freelist_count").scalar()) == 0
    assert database.read(lambda db: db.exec_driver_sql("PRAGMA page_count").scalar()) < 500
    database.close()
    assert _file_bytes(database) < before / 10


def test_run_records_highest_deleted_seq_id(database: Database, session: SessionRecord) -> None:
    run = add_run(database, session)
    done = [add_job(database, session, run_id=run.id, position=place) for place in (1, 2, 3)]
    for job in done:
        finish_job(database, job)
    _fetch(database, *done[:2])
    assert _sweep(database, NOW + 600).num_jobs == 2
    stored = database.read(lambda db: runs.find(db, run.id))
    assert stored is not None
    assert stored.forgotten_seq == 2
