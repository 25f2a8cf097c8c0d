"""Retention of sampling sessions, sessions and usage."""

from __future__ import annotations

import sqlalchemy as sa

from tests.support.store_rows import (
    BASE,
    NOW,
    add_checkpoint,
    add_run,
    add_sampler,
    add_session,
    add_tenant,
    count,
)
from tinkex.store import accounting, retention, schema
from tinkex.store.database import Database
from tinkex.store.records import RunState
from tinkex.store.retention import RetentionPolicy

DAY = 86_400.0


def _drop(database: Database, days: float) -> None:
    retention.delete_old(database, RetentionPolicy(), NOW + days * DAY)


def _ids(database: Database, table: sa.Table) -> set[str]:
    return database.read(lambda db: set(db.scalars(sa.select(table.c.id))))


def test_sampling_sessions_are_deleted_a_month_after_their_session(database: Database) -> None:
    tenant = add_tenant(database)
    over = add_session(database, tenant, finished_at=NOW)
    live = add_session(database, tenant)
    add_sampler(database, over)
    kept = add_sampler(database, live)
    _drop(database, 29)
    assert count(database, schema.samplers) == 2
    _drop(database, 31)
    assert _ids(database, schema.samplers) == {kept.id}
    assert _ids(database, schema.sessions) == {over.id, live.id}


def test_old_sessions_are_deleted_unless_checkpoints_or_models_remain(database: Database) -> None:
    tenant = add_tenant(database)
    empty, saved, usable, lost = (add_session(database, tenant, expired_at=NOW) for _ in range(4))
    live = add_session(database, tenant)
    add_run(database, empty, state=RunState.UNLOADED)
    with_checkpoint = add_run(database, saved, state=RunState.UNLOADED)
    add_checkpoint(database, with_checkpoint, "a")
    ready = add_run(database, usable)
    add_run(database, lost, state=RunState.FAILED)
    add_sampler(database, lost)
    _drop(database, 399)
    assert len(_ids(database, schema.sessions)) == 5
    _drop(database, 401)
    assert _ids(database, schema.sessions) == {saved.id, usable.id, live.id}
    assert _ids(database, schema.runs) == {with_checkpoint.id, ready.id}


def test_old_usage_is_deleted_by_hour(database: Database) -> None:
    for name in ("alice", "bob"):
        tenant = add_tenant(database, name)
        for hour in range(30):
            database.write(
                lambda db, tenant=tenant, hour=hour: accounting.add_usage(
                    db,
                    tenant_id=tenant.id,
                    session_id="s",
                    run_id=None,
                    base_model=BASE,
                    kind="sample",
                    amount=1,
                    now=NOW + hour * 3600,
                )
            )
    _drop(database, 399)
    assert count(database, schema.usage) == 60
    # More hours than one transaction deletes.
    _drop(database, 400 + 28 / 24)
    assert 0 < count(database, schema.usage) <= 6
