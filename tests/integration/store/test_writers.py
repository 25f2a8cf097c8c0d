"""Several processes write to one store: order, uniqueness, kills, and a full disk."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from tests.integration.store.writer_pool import WriterPool, session_of, writer_pool
from tests.support.store_rows import add_job, count
from tinkex.store import jobs, schema
from tinkex.store.database import Database
from tinkex.store.migrations import migrate
from tinkex.store.records import JobRecord

NUM_KILLS = 24


def _job_ids(database: Database) -> set[str]:
    return database.read(lambda db: set(db.scalars(sa.select(schema.jobs.c.id))))


def _check_whole(database: Database) -> None:
    """Check that no partial transaction exists and SQLite reports no damage."""
    pairs = sa.select(sa.func.count()).select_from(
        schema.jobs.join(schema.steps, schema.steps.c.job_id == schema.jobs.c.id)
    )
    num_pairs = database.read(lambda db: db.scalar(pairs))
    assert num_pairs == count(database, schema.jobs) == count(database, schema.steps)
    if database.is_sqlite:
        report = database.read(lambda db: db.exec_driver_sql("PRAGMA integrity_check").scalar())
        assert report == "ok"


def _read_all_events(
    writers: WriterPool, names: set[str]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return what each writer acknowledged, and why it stopped."""
    acknowledged: dict[str, list[str]] = {name: [] for name in names}
    reasons: dict[str, str] = {}
    while len(reasons) < len(names):
        what, name, rest = writers.read_event()
        if what == "ack":
            acknowledged[name].append(rest)
        elif what == "stop":
            reasons[name] = rest
    return acknowledged, reasons


def _read_ack(writers: WriterPool) -> str:
    what, _, job_id = writers.read_event()
    assert what == "ack"
    return job_id


def test_concurrent_processes_insert_a_key_once(database: Database, url: str) -> None:
    database.write(session_of)
    with writer_pool(url) as writers:
        for name in ("w.1", "w.2"):
            writers.start(name, 200)
        acknowledged, reasons = _read_all_events(writers, {"w.1", "w.2"})
    assert set(reasons.values()) == {"done"}
    ids = acknowledged["w.1"] + acknowledged["w.2"]
    assert len(ids) == 200
    assert set(ids) == _job_ids(database)
    _check_whole(database)


def test_numbers_grow_in_commit_order(database: Database, url: str) -> None:
    """A reader that continues from its last number misses nothing."""
    database.write(session_of)
    seen: list[JobRecord] = []

    def read_on() -> None:
        last = seen[-1].no if seen else 0
        seen.extend(database.read(lambda db: jobs.list_queued_after(db, last, 10_000)))

    with writer_pool(url) as writers:
        for name in ("a", "b"):
            writers.start(name, 150)
        num_stopped = 0
        while num_stopped < 2:
            num_stopped += writers.read_event()[0] == "stop"
            read_on()
    read_on()
    assert len(seen) == 300
    assert {job.id for job in seen} == _job_ids(database)


def test_two_handles_in_one_process_are_independent(
    database: Database, open_database: Callable[..., Database]
) -> None:
    session = database.write(session_of)
    other = open_database()
    for _ in range(20):
        add_job(database, session)
        add_job(other, session)
    assert len(_job_ids(database)) == 40


def test_acknowledged_writes_survive_kills(database: Database, url: str) -> None:
    database.write(session_of)
    rng = random.Random(20240607)
    acknowledged: set[str] = set()
    with writer_pool(url) as writers:
        for life in range(NUM_KILLS):
            name = f"life{life}"
            writers.start(name, 1_000_000)
            what, _, pid = writers.read_event()
            assert what == "pid"
            acknowledged |= {_read_ack(writers) for _ in range(rng.randint(1, 40))}
            # Somewhere within the next few commits.
            time.sleep(rng.uniform(0.0, 0.01))
            os.kill(int(pid), signal.SIGKILL)
            writers.await_exit(name)
            while (news := writers.read_event())[0] != "gone":
                acknowledged.add(news[2])
            assert acknowledged <= _job_ids(database)
            _check_whole(database)
    assert len(acknowledged) >= NUM_KILLS


def test_full_disk_raises_store_full_without_damage(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    database = Database(url)
    migrate(database)
    session = database.write(session_of)
    with writer_pool(url, max_file_bytes=3_000_000) as writers:
        writers.start("w", 1_000_000)
        acknowledged, reasons = _read_all_events(writers, {"w"})
        assert reasons == {"w": "StoreFull"}
        assert acknowledged["w"]
    assert set(acknowledged["w"]) <= _job_ids(database)
    _check_whole(database)
    # There is room again.
    add_job(database, session, payload=b"p" * 1_000_000)
    database.close()
