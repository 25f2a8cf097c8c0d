"""Jobs: inserted once per key, listed in order, finished once."""

from __future__ import annotations

import pytest

from tests.support.store_rows import (
    NOW,
    add_job,
    add_run,
    add_sampler,
    add_session,
    add_tenant,
    finish_job,
    new_job,
)
from tinkex.store import jobs, runs, samplers
from tinkex.store.database import Database
from tinkex.store.records import JobRecord, JobState, RunRecord, RunState, SessionRecord


@pytest.fixture
def session(database: Database) -> SessionRecord:
    return add_session(database, add_tenant(database))


@pytest.fixture
def run(database: Database, session: SessionRecord) -> RunRecord:
    return add_run(database, session)


def _find(database: Database, job: JobRecord) -> JobRecord:
    stored = database.read(lambda db: jobs.find(db, job.id))
    assert stored is not None
    return stored


def _run_now(database: Database, run: RunRecord) -> RunRecord:
    stored = database.read(lambda db: runs.find(db, run.id))
    assert stored is not None
    return stored


def test_idempotency_key_creates_one_job(database: Database, session: SessionRecord) -> None:
    first = add_job(database, session, key="k")
    again = database.write(lambda db: jobs.insert(db, new_job(session, key="k"), NOW))
    assert again is None
    assert database.read(lambda db: jobs.find_by_key(db, "k")) == first
    assert add_job(database, session).no != add_job(database, session).no


def test_job_numbers_are_not_reused_after_deletion(
    database: Database, session: SessionRecord
) -> None:
    last = add_job(database, session)
    database.write(lambda db: db.exec_driver_sql("DELETE FROM jobs"))
    assert add_job(database, session).no > last.no


def test_load_counts_unfinished_jobs(database: Database, session: SessionRecord) -> None:
    other = add_session(database, add_tenant(database, "bob"))
    done = add_job(database, session, payload=b"x" * 100)
    add_job(database, session, payload=b"123")
    add_job(database, other, payload=b"4567")
    finish_job(database, done)
    assert database.read(lambda db: jobs.get_load(db, session.tenant_id)) == (1, 3)
    assert database.read(jobs.get_load) == (2, 7)


def test_job_is_claimed_released_and_finished_once(
    database: Database, session: SessionRecord
) -> None:
    job = add_job(database, session, payload=b"\x00\xff")
    assert database.read(lambda db: jobs.list_queued_after(db, 0)) == [job]
    assert database.read(lambda db: jobs.get_payloads(db, [job.id])) == {job.id: b"\x00\xff"}
    database.write(lambda db: jobs.mark_started(db, [job.id], NOW + 1))
    taken = _find(database, job)
    assert (taken.state, taken.attempts, taken.started_at) == (JobState.RUNNING, 1, NOW + 1)
    assert database.read(lambda db: jobs.list_queued_after(db, 0)) == []
    assert database.write(jobs.requeue_running) == 1
    assert _find(database, job).attempts == 1
    database.write(lambda db: jobs.mark_started(db, [job.id], NOW + 2))
    assert database.write(lambda db: jobs.requeue_running(db, [job.id])) == 1
    assert _find(database, job).attempts == 1

    assert database.read(lambda db: jobs.list_finished(db, [job.id, "gone"])) == ["gone"]
    assert finish_job(database, job, result=b"\x00r")
    assert not finish_job(database, job, result=b"other")
    outcome = database.read(lambda db: jobs.find_with_result(db, job.id))
    assert outcome is not None
    assert (outcome.job.state, outcome.result) == (JobState.DONE, b"\x00r")
    assert outcome.job.is_finished
    assert database.read(lambda db: jobs.get_payloads(db, [job.id])) == {}
    assert database.read(lambda db: jobs.list_finished(db, [job.id])) == [job.id]


def test_failed_job_keeps_its_reason(database: Database, session: SessionRecord) -> None:
    job = add_job(database, session)
    finish_job(database, job, result=None, error="bad token", category="user")
    failed = _find(database, job)
    assert (failed.state, failed.error, failed.category) == (JobState.FAILED, "bad token", "user")


def test_job_with_too_many_attempts_fails(database: Database, session: SessionRecord) -> None:
    often, once = add_job(database, session), add_job(database, session)
    database.write(lambda db: jobs.mark_started(db, [often.id], NOW))
    database.write(jobs.requeue_running)
    database.write(lambda db: jobs.mark_started(db, [often.id, once.id], NOW))
    given_up = database.write(lambda db: jobs.fail_exhausted(db, "", max_attempts=2, now=NOW + 1))
    assert given_up == 1
    assert _find(database, often).error == (
        "the server's worker crashed 2 times during this job; it is not retried"
    )
    assert _find(database, once).state == JobState.RUNNING


def test_first_fetch_of_finished_job_is_recorded(
    database: Database, session: SessionRecord
) -> None:
    done, waiting = add_job(database, session), add_job(database, session)
    finish_job(database, done)
    for now in (NOW + 1, NOW + 2):
        database.write(lambda db, now=now: jobs.mark_fetched(db, [done.id, waiting.id], now))
    assert _find(database, done).fetched_at == NOW + 1
    assert _find(database, waiting).fetched_at is None


def test_changes_are_listed_for_replay_until_snapshot(
    database: Database, run: RunRecord, session: SessionRecord
) -> None:
    added = [add_job(database, session, run_id=run.id, payload=bytes([i])) for i in range(3)]
    finish_job(database, added[0], applied=1)
    finish_job(database, added[1])
    finish_job(database, added[2], applied=2)
    now = _run_now(database, run)
    assert (now.applied, now.next_seq) == (2, 3)

    def replayed(after: int, limit: int = 9) -> list[tuple[str, bytes]]:
        changes = database.read(lambda db: jobs.list_changes_after(db, run.id, after, limit=limit))
        return [(job.id, payload) for job, payload in changes]

    assert replayed(0) == [(added[0].id, b"\x00"), (added[2].id, b"\x02")]
    assert replayed(0, limit=1) == [(added[0].id, b"\x00")]
    database.write(lambda db: runs.set_snapshot(db, run.id, "somewhere", 1))
    now = _run_now(database, run)
    assert (now.snapshot, now.snapshot_applied) == ("somewhere", 1)
    assert replayed(1) == [(added[2].id, b"\x02")]


def test_older_snapshot_does_not_replace_newer_one(database: Database, run: RunRecord) -> None:
    database.write(lambda db: runs.set_snapshot(db, run.id, "newer", 5))
    database.write(lambda db: runs.set_snapshot(db, run.id, "older", 4))
    assert _run_now(database, run).snapshot == "newer"


def test_job_without_position_comes_last(
    database: Database, run: RunRecord, session: SessionRecord
) -> None:
    add_job(database, session, run_id=run.id, position=7)
    assert add_job(database, session, run_id=run.id).position == 8


def test_completions_are_returned_once_per_client(
    database: Database, session: SessionRecord
) -> None:
    sampler = add_sampler(database, session)
    clone = jobs.CLONE_STRIDE
    added = [
        add_job(database, session, sampler_id=sampler.id, position=place)
        for place in (0, 1, clone, clone + 1)
    ]
    finish_job(database, added[1], result=b"12345")
    finish_job(database, added[2], result=None, error="no", category="user")
    finish_job(database, added[0], result=b"")

    def since(
        clone: int, cursor: int, limit: int = 10
    ) -> tuple[list[samplers.SampleCompletion], int]:
        return database.read(
            lambda db: samplers.list_completions(db, sampler.id, clone, cursor, limit)
        )

    first, cursor = since(0, 0, limit=1)
    assert first == [(added[1].id, 5)]
    second, end = since(0, cursor)
    assert second == [(added[0].id, 0)]
    assert since(0, end) == ([], end)
    assert since(1, 0)[0] == [(added[2].id, None)]
    database.write(lambda db: samplers.delete_completions(db, sampler.id, [added[1].id]))
    assert since(0, 0)[0] == [(added[0].id, 0)]


def test_idle_runs_have_ended_sessions(
    database: Database, run: RunRecord, session: SessionRecord
) -> None:
    job = add_job(database, session, run_id=run.id)
    assert database.read(lambda db: runs.list_idle(db, [run.id])) == []
    database.write(lambda db: db.exec_driver_sql("UPDATE sessions SET expired_at = 1"))
    assert database.read(lambda db: runs.list_idle(db, [run.id])) == []
    finish_job(database, job)
    assert database.read(lambda db: runs.list_idle(db, [run.id])) == [run.id]
    database.write(lambda db: runs.set_state(db, run.id, RunState.UNLOADED))
    assert database.read(lambda db: runs.list_idle(db, [run.id])) == []
