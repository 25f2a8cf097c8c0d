"""Jobs: inserted once per key, run once, kept until their result is no longer needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa

from tinkex.store import blobs
from tinkex.store.dialects import insert_or_ignore, lock_rows
from tinkex.store.records import JobRecord, JobState, NewJob
from tinkex.store.schema import completions, jobs, runs

#: All columns except the idempotency key and the two that may be large.
_HEADER_COLUMNS = tuple(
    column for column in jobs.c if column.name not in {"key", "payload", "result"}
)
# Frequent statements are built once, because building takes longer than running.
_JOB_ID_PARAM: sa.BindParameter[str] = sa.bindparam("job_id")
_FIND = sa.select(*_HEADER_COLUMNS).where(jobs.c.id == _JOB_ID_PARAM)
_FIND_OUTCOME = sa.select(*_HEADER_COLUMNS, jobs.c.result).where(jobs.c.id == _JOB_ID_PARAM)
_FINISH = sa.update(jobs).where(jobs.c.id == _JOB_ID_PARAM, jobs.c.finished_at.is_(None))
_NEXT_SEQ_PARAM = sa.bindparam("new_next_seq", type_=sa.BigInteger)
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
_GROUP_PARAM: sa.BindParameter[str] = sa.bindparam("group")
_GROUP_OF_RUN = sa.select(runs.c.group_id).where(runs.c.id == sa.bindparam("run_id"))
_QUEUED_AFTER = (
    sa.select(*_HEADER_COLUMNS)
    .where(
        jobs.c.state == JobState.QUEUED,
        jobs.c.group_id == _GROUP_PARAM,
        jobs.c.no > sa.bindparam("no"),
    )
    .order_by(jobs.c.no)
    .limit(sa.bindparam("limit", type_=sa.Integer))
)
_JOB_IDS_PARAM: sa.BindParameter[str] = sa.bindparam("job_ids", expanding=True)
_IS_OWN_OPEN = sa.and_(
    jobs.c.id.in_(_JOB_IDS_PARAM), jobs.c.group_id == _GROUP_PARAM, jobs.c.finished_at.is_(None)
)
_PAYLOADS = sa.select(jobs.c.id, jobs.c.payload).where(_IS_OWN_OPEN)
_START = (
    sa.update(jobs)
    .where(_IS_OWN_OPEN, jobs.c.state == JobState.QUEUED)
    .values(state=JobState.RUNNING, attempts=jobs.c.attempts + 1)
)
#: The positions of a cloned sampling client start at its clone number times this.
CLONE_STRIDE = 1_000_000_000


class QueueLoad(NamedTuple):
    """Unfinished jobs and their payload bytes."""

    num_jobs: int
    num_bytes: int


class JobWithResult(NamedTuple):
    """A job and its result, if it has one."""

    job: JobRecord
    result: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnding:
    """The end of a job: result or error."""

    job: JobRecord
    result: bytes | None = None
    error: str | None = None
    category: str | None = None
    applied: int | None = None
    """Its number among the changes of the run; set for jobs that are replayed after a crash."""
    started_at: float
    finished_at: float


def insert(db: sa.Connection, new_job: NewJob, now: float) -> JobRecord | None:
    """Store a job; returns None if its key exists."""
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
        "payload_ref": new_job.payload_ref,
        "payload_bytes": new_job.num_bytes,
        "is_proto": new_job.is_proto,
        "result_bytes": 0,
        "num_sequences": new_job.num_sequences,
        "num_tokens": new_job.num_tokens,
        "base_model": new_job.base_model,
        "group_id": _group_of(db, new_job),
        "cancelled_at": now if new_job.is_cancelled else None,
        "process_id": new_job.process_id,
        "created_at": now,
    }
    row = db.execute(
        insert_or_ignore(db, jobs, "key", returning=_HEADER_COLUMNS), values
    ).one_or_none()
    return None if row is None else JobRecord.from_row(row)


def _group_of(db: sa.Connection, new_job: NewJob) -> str:
    """Return the group of the job's run, or the one chosen for a job without a run."""
    if new_job.run_id is None:
        return new_job.group_id
    return db.scalar(_GROUP_OF_RUN, {"run_id": new_job.run_id}) or ""


def _next_position(db: sa.Connection, run_id: str | None) -> int:
    if run_id is None:
        return 0
    last = db.scalar(
        sa.select(sa.func.max(jobs.c.position)).where(
            jobs.c.run_id == run_id, jobs.c.finished_at.is_(None)
        )
    )
    next_seq = db.scalar(sa.select(runs.c.next_seq).where(runs.c.id == run_id))
    return max(-1 if last is None else last, (next_seq or 0) - 1) + 1


def find_by_key(db: sa.Connection, key: str) -> JobRecord | None:
    """Return the job with this idempotency key."""
    row = db.execute(_BY_KEY, {"key": key}).one_or_none()
    return None if row is None else JobRecord.from_row(row)


def find(db: sa.Connection, job_id: str) -> JobRecord | None:
    """Return a job by id."""
    row = db.execute(_FIND, {"job_id": job_id}).one_or_none()
    return None if row is None else JobRecord.from_row(row)


def find_with_result(db: sa.Connection, job_id: str) -> JobWithResult | None:
    """Return a job by id, with its result if it has one."""
    row = db.execute(_FIND_OUTCOME, {"job_id": job_id}).one_or_none()
    if row is None:
        return None
    *header, result = row
    return JobWithResult(JobRecord(**dict(zip(_HEADER_NAMES, header, strict=True))), result)


_HEADER_NAMES = [column.name for column in _HEADER_COLUMNS]


def list_finished(db: sa.Connection, job_ids: Iterable[str]) -> list[str]:
    """Return which of these jobs are finished or deleted."""
    ids = list(job_ids)
    still_open = set(
        db.scalars(sa.select(jobs.c.id).where(jobs.c.id.in_(ids), jobs.c.finished_at.is_(None)))
    )
    return [job_id for job_id in ids if job_id not in still_open]


def request_cancel(db: sa.Connection, job_id: str, now: float) -> bool:
    """Mark an unfinished job for cancellation; returns False if it is finished."""
    statement = sa.update(jobs).where(jobs.c.id == job_id, jobs.c.finished_at.is_(None))
    return bool(db.execute(statement.values(cancelled_at=now)).rowcount)


def list_cancel_requested(db: sa.Connection) -> list[str]:
    """Return the unfinished jobs that are marked for cancellation."""
    is_open = sa.and_(jobs.c.finished_at.is_(None), jobs.c.cancelled_at.is_not(None))
    return list(db.scalars(sa.select(jobs.c.id).where(is_open)))


def list_open_ids(db: sa.Connection, run_id: str, session_id: str, *, limit: int) -> list[str]:
    """Return the unfinished jobs of a model and the unfinished samples of its session."""
    is_sample = sa.and_(jobs.c.session_id == session_id, jobs.c.sampler_id.is_not(None))
    query = sa.select(jobs.c.id).where(
        jobs.c.state.in_([JobState.QUEUED, JobState.RUNNING]),
        sa.or_(jobs.c.run_id == run_id, is_sample),
    )
    return list(db.scalars(query.order_by(jobs.c.no).limit(limit)))


def list_to_stop(db: sa.Connection, job_ids: Sequence[str]) -> list[str]:
    """Return which of these jobs are finished, and all jobs marked for cancellation."""
    return [*list_finished(db, job_ids), *list_cancel_requested(db)]


def mark_fetched(db: sa.Connection, job_ids: Sequence[str], now: float) -> None:
    """Record when results were first fetched by their client."""
    is_new = sa.and_(
        jobs.c.id.in_(job_ids), jobs.c.finished_at.is_not(None), jobs.c.fetched_at.is_(None)
    )
    # In the same order as a snapshot, which drops the payloads of finished jobs.
    lock_rows(db, sa.select(jobs.c.no).where(is_new).order_by(jobs.c.no))
    db.execute(sa.update(jobs).where(is_new).values(fetched_at=now))


def get_load(db: sa.Connection, tenant_id: str | None = None) -> QueueLoad:
    """Return the load of unfinished jobs, of one tenant or of all."""
    if tenant_id is None:
        rows = db.execute(_LOAD)
    else:
        rows = db.execute(_LOAD_OF_TENANT, {"tenant_id": tenant_id})
    num_jobs, num_bytes = rows.one()
    return QueueLoad(num_jobs, int(num_bytes))


def list_open_by_session(
    db: sa.Connection, tenant_id: str, session_id: str, *, limit: int
) -> list[JobRecord]:
    """Return the unfinished jobs of a session, in order of arrival."""
    is_open = sa.and_(jobs.c.tenant_id == tenant_id, jobs.c.finished_at.is_(None))
    query = sa.select(*_HEADER_COLUMNS).where(is_open, jobs.c.session_id == session_id)
    return [JobRecord.from_row(row) for row in db.execute(query.order_by(jobs.c.no).limit(limit))]


# --- used by the worker ----------------------------------------------------------------------
def list_queued_after(
    db: sa.Connection, no: int, limit: int = 1000, *, group_id: str = ""
) -> list[JobRecord]:
    """Return a group's queued jobs with a higher number, in order of arrival."""
    rows = db.execute(_QUEUED_AFTER, {"no": no, "limit": limit, "group": group_id})
    return [JobRecord.from_row(row) for row in rows]


_QUEUED_NUMBERS = sa.select(jobs.c.no).where(
    jobs.c.state == JobState.QUEUED,
    jobs.c.group_id == _GROUP_PARAM,
    jobs.c.no > sa.bindparam("after"),
    jobs.c.no <= sa.bindparam("last"),
)
_QUEUED_BY_NUMBER = (
    sa.select(*_HEADER_COLUMNS)
    .where(
        jobs.c.state == JobState.QUEUED,
        jobs.c.group_id == _GROUP_PARAM,
        jobs.c.no.in_(sa.bindparam("numbers", expanding=True)),
    )
    .order_by(jobs.c.no)
)


def list_queued_numbers(db: sa.Connection, after: int, last: int, *, group_id: str) -> list[int]:
    """Return the numbers of a group's queued jobs in (after, last]."""
    return list(db.scalars(_QUEUED_NUMBERS, {"after": after, "last": last, "group": group_id}))


def list_queued_by_number(
    db: sa.Connection, numbers: Sequence[int], *, group_id: str
) -> list[JobRecord]:
    """Return a group's queued jobs with these numbers, in order."""
    rows = db.execute(_QUEUED_BY_NUMBER, {"numbers": list(numbers), "group": group_id})
    return [JobRecord.from_row(row) for row in rows]


def get_payloads(
    db: sa.Connection, job_ids: Sequence[str], *, group_id: str = ""
) -> dict[str, bytes]:
    """Return the payloads of a group's unfinished jobs, by id."""
    rows = db.execute(_PAYLOADS, {"job_ids": list(job_ids), "group": group_id})
    return {row.id: row.payload for row in rows}


def list_payloads_of_kind(db: sa.Connection, kind: str) -> list[bytes]:
    """Return all stored payloads of a kind: unfinished jobs, and jobs kept for replay."""
    query = sa.select(jobs.c.payload).where(jobs.c.kind == kind, jobs.c.payload.is_not(None))
    return list(db.scalars(query))


def mark_started(
    db: sa.Connection, job_ids: Sequence[str], now: float, *, group_id: str = ""
) -> None:
    """Mark a group's jobs as running and count an attempt."""
    db.execute(_START, {"job_ids": list(job_ids), "started_at": now, "group": group_id})


def requeue_running(
    db: sa.Connection, job_ids: Sequence[str] | None = None, *, group_id: str = ""
) -> int:
    """Requeue all running jobs of a group, or the given ones."""
    statement = sa.update(jobs).where(jobs.c.state == JobState.RUNNING, jobs.c.group_id == group_id)
    if job_ids is not None:
        # A regular shutdown does not count as an attempt.
        statement = statement.where(jobs.c.id.in_(job_ids)).values(attempts=jobs.c.attempts - 1)
    return db.execute(statement.values(state=JobState.QUEUED, started_at=None)).rowcount


def fail_exhausted(db: sa.Connection, group_id: str, *, max_attempts: int, now: float) -> int:
    """Fail a group's running jobs that reached the maximum number of attempts; returns how many."""
    query = sa.select(*_HEADER_COLUMNS).where(
        jobs.c.state == JobState.RUNNING,
        jobs.c.group_id == group_id,
        jobs.c.attempts >= max_attempts,
    )
    reason = f"the server's worker crashed {max_attempts} times during this job; it is not retried"
    exhausted = [JobRecord.from_row(row) for row in db.execute(query)]
    for job in exhausted:
        ending = JobEnding(
            job=job,
            error=reason,
            category="server",
            started_at=job.started_at or now,
            finished_at=now,
        )
        finish(db, ending)
    return len(exhausted)


def finish(db: sa.Connection, ending: JobEnding) -> bool:
    """Store the end of a job; returns False, without effect, if it was finished before."""
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
        # Changes keep their payload, which is replayed until a snapshot includes it.
        values["payload"] = None
        if job.payload_ref is not None:
            values["payload_ref"] = None
    changed = db.execute(_FINISH, values).rowcount
    if changed and ending.applied is None and job.payload_ref is not None:
        blobs.mark_place_unused(db, job.payload_ref)
    if changed and job.run_id is not None:
        _advance_run(db, ending)
    if changed and job.sampler_id is not None:
        _insert_completion(db, job, None if is_failure else size, ending.finished_at)
    return bool(changed)


def _advance_run(db: sa.Connection, ending: JobEnding) -> None:
    values = {
        "advanced": ending.job.run_id,
        "new_next_seq": ending.job.position + 1,
        "used_at": ending.finished_at,
    }
    if ending.applied is not None:
        values["applied"] = ending.applied
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
    """Return the jobs that changed a run after a snapshot, in order, with payloads."""
    query = (
        sa.select(*_HEADER_COLUMNS, jobs.c.payload)
        .where(jobs.c.run_id == run_id, jobs.c.applied > applied)
        .order_by(jobs.c.applied)
        .limit(limit)
    )
    changes = []
    for *header, payload in db.execute(query):
        changes.append((JobRecord(**dict(zip(_HEADER_NAMES, header, strict=True))), payload))
    return changes
