"""Rows with values that the tests do not care about."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tinkex.ids import new_id
from tinkex.store import checkpoints, jobs, keys, runs, samplers, sessions
from tinkex.store.database import Database
from tinkex.store.jobs import Ending
from tinkex.store.records import (
    Checkpoint,
    Job,
    NewJob,
    Run,
    RunState,
    Sampler,
    Session,
    Step,
    Tenant,
)

NOW = 1_700_000_000.0
BASE = "tinkex/bigram"


def add_tenant(database: Database, name: str = "alice") -> Tenant:
    return database.write(lambda db: keys.tenant_named(db, name, NOW))


def add_session(database: Database, tenant: Tenant, **changes: Any) -> Session:
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
    session = Session(**values | changes)
    database.write(lambda db: sessions.insert(db, session))
    return session


def add_run(database: Database, session: Session, **changes: Any) -> Run:
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
    run = Run(**values | changes)
    database.write(lambda db: runs.insert(db, run))
    return run


def add_sampler(database: Database, session: Session, **changes: Any) -> Sampler:
    values = {
        "id": new_id(),
        "tenant_id": session.tenant_id,
        "session_id": session.id,
        "base_model": BASE,
        "model_path": None,
        "checkpoint_id": None,
        "created_at": NOW,
    }
    sampler = Sampler(**values | changes)
    database.write(lambda db: samplers.insert(db, sampler))
    return sampler


def add_checkpoint(database: Database, run: Run, name: str, **changes: Any) -> Checkpoint:
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
    checkpoint = Checkpoint(**values | changes)
    database.write(lambda db: checkpoints.insert(db, checkpoint))
    return checkpoint


def new_job(session: Session, **changes: Any) -> NewJob:
    values = {
        "id": new_id(),
        "tenant_id": session.tenant_id,
        "session_id": session.id,
        "kind": "sample",
        "key": None,
        "payload": b"payload",
    }
    return NewJob(**values | changes)


def add_job(database: Database, session: Session, **changes: Any) -> Job:
    job = database.write(lambda db: jobs.insert(db, new_job(session, **changes), NOW))
    assert job is not None
    return job


def ending(job: Job, **changes: Any) -> Ending:
    values = {"job": job, "result": b"result", "started_at": NOW, "finished_at": NOW}
    return Ending(**values | changes)


def finish_job(database: Database, job: Job, **changes: Any) -> bool:
    return database.write(lambda db: jobs.finish(db, ending(job, **changes)))


def make_step(session: Session, **changes: Any) -> Step:
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
    return Step(**values | changes)


def count(database: Database, table: sa.Table) -> int:
    return database.read(lambda db: db.scalar(sa.select(sa.func.count()).select_from(table))) or 0
