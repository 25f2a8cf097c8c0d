"""Insert rows with default values into a store."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tinkex.ids import new_id
from tinkex.store import checkpoints, jobs, keys, runs, samplers, sessions
from tinkex.store.database import Database
from tinkex.store.jobs import JobEnding
from tinkex.store.records import (
    CheckpointRecord,
    JobRecord,
    NewJob,
    RunRecord,
    RunState,
    SamplerRecord,
    SessionRecord,
    StepRecord,
    TenantRecord,
)

NOW = 1_700_000_000.0
BASE = "tinkex/bigram"


def add_tenant(database: Database, name: str = "alice") -> TenantRecord:
    return database.write(lambda db: keys.get_or_create_tenant(db, name, NOW))


def add_session(database: Database, tenant: TenantRecord, **changes: Any) -> SessionRecord:
    values = {
        "id": new_id(),
        "tenant_id": tenant.id,
        "project_id": "default",
        "display_name": None,
        "tags": ["a"],
        "user_metadata": {},
        "sdk_version": "1",
        "created_at": NOW,
        "seen_at": NOW,
    }
    session = SessionRecord(**values | changes)
    database.write(lambda db: sessions.insert(db, session))
    return session


def add_run(database: Database, session: SessionRecord, **changes: Any) -> RunRecord:
    values = {
        "id": new_id(),
        "tenant_id": session.tenant_id,
        "session_id": session.id,
        "base_model": BASE,
        "spec": {"rank": 8},
        "user_metadata": None,
        "state": RunState.READY,
        "created_at": NOW,
        "used_at": NOW,
    }
    run = RunRecord(**values | changes)
    database.write(lambda db: runs.insert(db, run))
    return run


def add_sampler(database: Database, session: SessionRecord, **changes: Any) -> SamplerRecord:
    values = {
        "id": new_id(),
        "tenant_id": session.tenant_id,
        "session_id": session.id,
        "base_model": BASE,
        "model_path": None,
        "checkpoint_id": None,
        "created_at": NOW,
    }
    sampler = SamplerRecord(**values | changes)
    database.write(lambda db: samplers.insert(db, sampler))
    return sampler


def add_checkpoint(
    database: Database, run: RunRecord, name: str, **changes: Any
) -> CheckpointRecord:
    values = {
        "id": new_id(),
        "tenant_id": run.tenant_id,
        "session_id": run.session_id,
        "project_id": "default",
        "run_id": run.id,
        "segment": "weights",
        "name": name,
        "base_model": BASE,
        "spec": {"rank": 8},
        "size_bytes": 100,
        "created_at": NOW,
    }
    checkpoint = CheckpointRecord(**values | changes)
    database.write(lambda db: checkpoints.insert(db, checkpoint))
    return checkpoint


def new_job(session: SessionRecord, **changes: Any) -> NewJob:
    values = {
        "id": new_id(),
        "tenant_id": session.tenant_id,
        "session_id": session.id,
        "kind": "sample",
        "key": None,
        "payload": b"payload",
    }
    return NewJob(**values | changes)


def add_job(database: Database, session: SessionRecord, **changes: Any) -> JobRecord:
    job = database.write(lambda db: jobs.insert(db, new_job(session, **changes), NOW))
    assert job is not None
    return job


def ending(job: JobRecord, **changes: Any) -> JobEnding:
    values = {"job": job, "result": b"result", "started_at": NOW, "finished_at": NOW}
    return JobEnding(**values | changes)


def finish_job(database: Database, job: JobRecord, **changes: Any) -> bool:
    return database.write(lambda db: jobs.finish(db, ending(job, **changes)))


def make_step(session: SessionRecord, **changes: Any) -> StepRecord:
    values = {
        "session_id": session.id,
        "run_id": None,
        "sampler_id": None,
        "kind": "sample",
        "job_id": new_id(),
        "num_tokens": 3,
        "metrics": None,
        "queued_at": NOW,
        "started_at": NOW,
        "finished_at": NOW,
    }
    return StepRecord(**values | changes)


def count(database: Database, table: sa.Table) -> int:
    return database.read(lambda db: db.scalar(sa.select(sa.func.count()).select_from(table))) or 0
