"""Promises: made once, run once, remembered until their result is no longer needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa

from tinkex.store.dialects import insert_or_ignore
from tinkex.store.records import JobRecord, JobState, NewJob
from tinkex.store.schema import completions, jobs, runs

#: Every column but the two that may be large.
_HEADER_COLUMNS = tuple(
    column for column in jobs.c if column.name not in {"key", "payload", "result"}
)
# Statements of every request are built once: that takes longer than running them.
_JOB_ID_PARAM: sa.BindParameter[str] = sa.bindparam("job_id")
_FIND = sa.select(*_HEADER_COLUMNS).where(jobs.c.id == _JOB_ID_PARAM)
_FIND_OUTCOME = sa.select(*_HEADER_COLUMNS, jobs.c.result).where(jobs.c.id == _JOB_ID_PARAM)
_FINISH = sa.update(jobs).where(jobs.c.id == _JOB_ID_PARAM, jobs.c.finished_at.is_(None))
_NEXT_SEQ_PARAM = sa.bindparam("following", type_=sa.BigInteger)
_ADVANCE = (
    sa.update(runs)
    .where(runs.c.id == sa.bindparam("advanced"))
    .values(
        next_seq=sa.case(
            (runs.c.next_seq < _NEXT_SEQ_PARAM, _NEXT_SEQ_PARAM), else_=runs.c.next_seq
        )
    )
)
_INSERT_COMPLETION = sa.insert(completions)
_BY_KEY = sa.select(*_HEADER_COLUMNS).where(jobs.c.key == sa.bindparam("key"))
_LOAD = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(jobs.c.payload_bytes), 0)).where(
    jobs.c.finished_at.is_(None)
)
_LOAD_OF_TENANT = _LOAD.where(jobs.c.tenant_id == sa.bindparam("tenant_id"))
_QUEUED_AFTER = (
    sa.select(*_HEADER_COLUMNS)
    .where(jobs.c.state == JobState.QUEUED, jobs.c.no > sa.bindparam("no"))
    .order_by(jobs.c.no)
    .limit(sa.bindparam("limit", type_=sa.Integer))
)
_JOB_IDS_PARAM: sa.BindParameter[str] = sa.bindparam("job_ids", expanding=True)
_PAYLOADS = sa.select(jobs.c.id, jobs.c.payload).where(
    jobs.c.id.in_(_JOB_IDS_PARAM), jobs.c.finished_at.is_(None)
)
_START = (
    sa.update(jobs)
    .where(jobs.c.id.in_(_JOB_IDS_PARAM), jobs.c.state == JobState.QUEUED)
    .values(state=JobState.RUNNING, attempts=jobs.c.attempts + 1)
)
#: A clone of a sampling client counts its requests from its own number times this.
CLONE_STRIDE = 1_000_000_000


class QueueLoad(NamedTuple):
    """How much a tenant has waiting."""

    num_jobs: int
    num_bytes: int


class JobWithResult(NamedTuple):
    """What came of a promise."""

    job: JobRecord
    result: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnding:
    """How a promise ends."""

    job: JobRecord
    result: bytes | None = None
    error: str | None = None
    category: str | None = None
    applied: int | None = None
    """Its place among what changed the run, if it did: it is replayed after a crash."""
    started_at: float
    finished_at: float


def insert(db: sa.Connection, new_job: NewJob, now: float) -> JobRecord | None:
    """Store a promise; None if its key was promised before."""
    values = {
        "id": new_job.id,
        "tenant_id": new_job.tenant_id,
        "session_id": new_job.session_id,
        "kind": new_job.kind,
        "key": new_job.key,
        "run_id": new_job.run_id,
        "sampler_id": new_job.sampler_id,
        "position": _next_position(db, new_job.run_id)
        if new_job.position is None
        else new_job.position,
        "state": JobState.QUEUED,
        "attempts": 0,
        "payload": new_job.payload,
        "payload_bytes": len(new_job.payload),
        "is_proto": new_job.is_proto,
        "result_bytes": 0,
        "num_sequences": new_job.num_sequences,
        "num_tokens": new_job.num_tokens,
        "base_model": new_job.base_model,
        "cancelled_at": now if new_job.is_cancelled else None,
        "created_at": now,
    }
    row = db.execute(
        insert_or_ignore(db, jobs, "key", returning=_HEADER_COLUMNS), values
    ).one_or_none()
    return None if row is None else JobRecord.from_row(row)


def _next_position(db: sa.Connection, run_id: str | None) -> int:
    if run_id is None:
        return 0
    known = db.scalar(
        sa.select(sa.func.max(jobs.c.position)).where(
            jobs.c.run_id == run_id, jobs.c.finished_at.is_(None)
        )
    )
    following = db.scalar(sa.select(runs.c.next_seq).where(runs.c.id == run_id))
    return max(-1 if known is None else known, (following or 0) - 1) + 1


def find_by_key(db: sa.Connection, key: str) -> JobRecord | None:
    """The promise that was made for this key."""
    row = db.execute(_BY_KEY, {"key": key}).one_or_none()
    return None if row is None else JobRecord.from_row(row)


def find(db: sa.Connection, job_id: str) -> JobRecord | None:
    """A promise by id."""
    row = db.execute(_FIND, {"job_id": job_id}).one_or_none()
    return None if row is None else JobRecord.from_row(row)


def find_with_result(db: sa.Connection, job_id: str) -> JobWithResult | None:
    """A promise with its result, if there is one."""
    row = db.execute(_FIND_OUTCOME, {"job_id": job_id}).one_or_none()
    if row is None:
        return None
    *header, result = row
    return JobWithResult(JobRecord(**dict(zip(_HEADER_NAMES, header, strict=True))), result)


_HEADER_NAMES = [column.name for column in _HEADER_COLUMNS]


def list_finished(db: sa.Connection, job_ids: Iterable[str]) -> list[str]:
    """Which of these promises are over, or gone."""
    asked = list(job_ids)
    still_open = set(
        db.scalars(sa.select(jobs.c.id).where(jobs.c.id.in_(asked), jobs.c.finished_at.is_(None)))
    )
    return [job_id for job_id in asked if job_id not in still_open]


def request_cancel(db: sa.Connection, job_id: str, now: float) -> bool:
    """Mark a job that is not over for cancellation; False if it is over."""
    statement = sa.update(jobs).where(jobs.c.id == job_id, jobs.c.finished_at.is_(None))
    return bool(db.execute(statement.values(cancelled_at=now)).rowcount)


def list_cancel_requested(db: sa.Connection) -> list[str]:
    """Jobs that are marked for cancellation and not over."""
    is_open = sa.and_(jobs.c.finished_at.is_(None), jobs.c.cancelled_at.is_not(None))
    return list(db.scalars(sa.select(jobs.c.id).where(is_open)))


def list_to_stop(db: sa.Connection, job_ids: Sequence[str]) -> list[str]:
    """The jobs among these that are over, and all whose cancellation was requested."""
    return [*list_finished(db, job_ids), *list_cancel_requested(db)]


def mark_fetched(db: sa.Connection, job_ids: Sequence[str], now: float) -> None:
    """Note that results have reached their client; the first time counts."""
    db.execute(
        sa.update(jobs)
        .where(jobs.c.id.in_(job_ids), jobs.c.finished_at.is_not(None), jobs.c.fetched_at.is_(None))
        .values(fetched_at=now)
    )


def get_load(db: sa.Connection, tenant_id: str | None = None) -> QueueLoad:
    """What is waiting or running, of one tenant or of all."""
    everybody = tenant_id is None
    found = (
        db.execute(_LOAD) if everybody else db.execute(_LOAD_OF_TENANT, {"tenant_id": tenant_id})
    )
    num_jobs, num_bytes = found.one()
    return QueueLoad(num_jobs, int(num_bytes))


def list_open_by_session(
    db: sa.Connection, tenant_id: str, session_id: str, *, limit: int
) -> list[JobRecord]:
    """What is waiting or running of a session, in the order of arrival."""
    is_open = sa.and_(jobs.c.tenant_id == tenant_id, jobs.c.finished_at.is_(None))
    query = sa.select(*_HEADER_COLUMNS).where(is_open, jobs.c.session_id == session_id)
    return [JobRecord.from_row(row) for row in db.execute(query.order_by(jobs.c.no).limit(limit))]


# --- the worker's side -----------------------------------------------------------------------
def list_queued_after(db: sa.Connection, no: int, limit: int = 1000) -> list[JobRecord]:
    """Promises that wait and arrived after this one, in the order of arrival."""
    return [
        JobRecord.from_row(row) for row in db.execute(_QUEUED_AFTER, {"no": no, "limit": limit})
    ]


def get_payloads(db: sa.Connection, job_ids: Sequence[str]) -> dict[str, bytes]:
    """The payloads of promises that are not over, by id."""
    found = db.execute(_PAYLOADS, {"job_ids": list(job_ids)})
    return {row.id: row.payload for row in found}


def list_payloads_of_kind(db: sa.Connection, kind: str) -> list[bytes]:
    """The payloads of a kind that are still to be done, or would be done again after a crash."""
    query = sa.select(jobs.c.payload).where(jobs.c.kind == kind, jobs.c.payload.is_not(None))
    return list(db.scalars(query))


def mark_started(db: sa.Connection, job_ids: Sequence[str], now: float) -> None:
    """Note that the worker has taken promises; each time counts as an attempt."""
    db.execute(_START, {"job_ids": list(job_ids), "started_at": now})


def requeue_running(db: sa.Connection, job_ids: Sequence[str] | None = None) -> int:
    """Put back what a worker had taken: all of it, or these."""
    statement = sa.update(jobs).where(jobs.c.state == JobState.RUNNING)
    if job_ids is not None:
        # Given back in good order: this attempt does not count against the job.
        statement = statement.where(jobs.c.id.in_(job_ids)).values(attempts=jobs.c.attempts - 1)
    return db.execute(statement.values(state=JobState.QUEUED, started_at=None)).rowcount


def fail_exhausted(db: sa.Connection, *, max_attempts: int, reason: str, now: float) -> int:
    """Fail what a worker had taken so often that it seems to kill it."""
    query = sa.select(*_HEADER_COLUMNS).where(
        jobs.c.state == JobState.RUNNING, jobs.c.attempts >= max_attempts
    )
    doomed = [JobRecord.from_row(row) for row in db.execute(query)]
    for job in doomed:
        ending = JobEnding(
            job=job,
            error=reason,
            category="server",
            started_at=job.started_at or now,
            finished_at=now,
        )
        finish(db, ending)
    return len(doomed)


def finish(db: sa.Connection, ending: JobEnding) -> bool:
    """Store how a promise ended; False if it was over before, and then nothing changes."""
    job = ending.job
    is_failure = ending.error is not None
    size = len(ending.result or b"")
    values = {
        "job_id": job.id,
        "state": JobState.FAILED if is_failure else JobState.DONE,
        "result": ending.result,
        "result_bytes": size,
        "error": ending.error,
        "category": ending.category,
        "applied": ending.applied,
        "started_at": ending.started_at,
        "finished_at": ending.finished_at,
    }
    if ending.applied is None:
        # Others keep it: a change is replayed from its payload until a snapshot covers it.
        values["payload"] = None
    changed = db.execute(_FINISH, values).rowcount
    if changed and job.run_id is not None:
        _advance_run(db, job, ending.applied)
    if changed and job.sampler_id is not None:
        _insert_completion(db, job, None if is_failure else size, ending.finished_at)
    return bool(changed)


def _advance_run(db: sa.Connection, job: JobRecord, applied: int | None) -> None:
    values = {"advanced": job.run_id, "following": job.position + 1}
    if applied is not None:
        values["applied"] = applied
    db.execute(_ADVANCE, values)


def _insert_completion(db: sa.Connection, job: JobRecord, size: int | None, now: float) -> None:
    db.execute(
        _INSERT_COMPLETION,
        {
            "sampler_id": job.sampler_id,
            "clone": job.position // CLONE_STRIDE,
            "job_id": job.id,
            "result_bytes": size,
            "created_at": now,
        },
    )


def list_changes_after(
    db: sa.Connection, run_id: str, applied: int, *, limit: int
) -> list[tuple[JobRecord, bytes]]:
    """What changed a run after a snapshot, in the order it happened, with payloads."""
    query = (
        sa.select(*_HEADER_COLUMNS, jobs.c.payload)
        .where(jobs.c.run_id == run_id, jobs.c.applied > applied)
        .order_by(jobs.c.applied)
        .limit(limit)
    )
    found = []
    for *header, payload in db.execute(query):
        found.append((JobRecord(**dict(zip(_HEADER_NAMES, header, strict=True))), payload))
    return found
