from __future__ import annotations

from tests.support.store_rows import NOW, add_session, add_tenant
from tinkex.store import coordination, jobs, sessions, stats
from tinkex.store.database import Connection, Database
from tinkex.store.records import NewJob, ProcessRecord


def test_empty_store_reports_only_its_size(database: Database) -> None:
    totals = database.read(lambda db: stats.collect_stats(db, alive_since=NOW))

    assert (totals.num_waiting, totals.num_running, totals.oldest_waiting_at) == (0, 0, None)
    assert (totals.num_sessions, totals.num_workers) == (0, 0)
    assert totals.store_bytes > 0


def test_stats_count_pending_running_and_sessions(database: Database) -> None:
    tenant = add_tenant(database)
    open_session, finished = (add_session(database, tenant) for _ in range(2))

    def fill(db: Connection) -> None:
        for number in range(4):
            new = NewJob(
                id=str(number),
                tenant_id=tenant.id,
                session_id=open_session.id,
                kind="optim_step",
                key=None,
                payload=b"{}",
                position=number,
            )
            jobs.insert(db, new, NOW + number)
        jobs.mark_started(db, ["0"], NOW)
        sessions.finish(db, finished.id, "success", None, NOW)
        for role, seen_at in (("worker", NOW), ("worker", NOW - 60.0), ("api", NOW)):
            name = f"{role}{seen_at}"
            entry = ProcessRecord(id=name, role=role, bell="b:1", started_at=NOW, seen_at=seen_at)
            coordination.register_process(db, entry)

    database.write(fill)
    totals = database.read(lambda db: stats.collect_stats(db, alive_since=NOW - 30.0))

    assert (totals.num_waiting, totals.num_running) == (3, 1)
    assert totals.oldest_waiting_at == NOW + 1
    assert (totals.num_sessions, totals.num_workers) == (1, 1)
