"""Database access: grouped commits, order, isolated failures and error conversion."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.store_rows import NOW, add_session, add_tenant, count
from tinkex.errors import ConfigError, InvalidInput, StoreBusy, StoreFull, StoreUnavailable
from tinkex.store import keys, schema, settings
from tinkex.store.database import Database
from tinkex.store.migrations import migrate

#: Nothing here takes this long; it only says that nothing hangs.
TIMEOUT_SECONDS = 60.0


class Gate:
    """Block the writer thread, so that other writes are queued."""

    def __init__(self, database: Database) -> None:
        self._entered = threading.Event()
        self._opened = threading.Event()
        self._future = database.write_soon(self._wait)
        assert self._entered.wait(TIMEOUT_SECONDS)

    def _wait(self, _db: sa.Connection) -> None:
        self._entered.set()
        assert self._opened.wait(TIMEOUT_SECONDS)

    def open(self) -> None:
        self._opened.set()
        self._future.result()


def _add(name: str) -> Callable[[sa.Connection], object]:
    return lambda db: keys.get_or_create_tenant(db, name, NOW)


def _names(database: Database) -> list[str]:
    query = sa.select(schema.tenants.c.name).order_by(schema.tenants.c.name)
    return database.read(lambda db: list(db.scalars(query)))


def test_queued_writes_share_one_commit(database: Database) -> None:
    commits: list[object] = []
    sa.event.listen(database.engine, "commit", commits.append)
    gate = Gate(database)
    futures = [database.write_soon(_add(str(place))) for place in range(10)]
    gate.open()
    for future in futures:
        future.result()
    assert len(_names(database)) == 10
    assert len(commits) == 2


def test_writes_take_effect_in_call_order(database: Database) -> None:
    order: list[int] = []
    futures = [
        database.write_soon(lambda db, place=place: order.append(place)) for place in range(200)
    ]
    for future in futures:
        future.result()
    assert order == list(range(200))


def _explode(db: sa.Connection) -> None:
    keys.get_or_create_tenant(db, "half", NOW)
    raise ValueError("mine alone")


def _misspell(db: sa.Connection) -> None:
    keys.get_or_create_tenant(db, "half", NOW)
    db.exec_driver_sql("SELEKT 1")


def _orphan(db: sa.Connection) -> None:
    keys.insert_key(db, "nobody", "tml-x", name="n", now=NOW)


@pytest.mark.parametrize(
    ("work", "error"),
    [(_explode, ValueError), (_misspell, StoreUnavailable), (_orphan, StoreUnavailable)],
)
def test_failed_write_is_rolled_back_alone(
    database: Database, work: Callable[[sa.Connection], None], error: type[Exception]
) -> None:
    gate = Gate(database)
    first = database.write_soon(_add("before"))
    bad = database.write_soon(work)
    last = database.write_soon(_add("after"))
    gate.open()
    with pytest.raises(error):
        bad.result()
    first.result()
    last.result()
    assert _names(database) == ["after", "before"]
    assert count(database, schema.api_keys) == 0


def test_cancelled_write_is_skipped(database: Database) -> None:
    gate = Gate(database)
    cancelled = database.write_soon(_add("cancelled"))
    kept = database.write_soon(_add("kept"))
    assert cancelled.cancel()
    gate.open()
    kept.result(TIMEOUT_SECONDS)
    with pytest.raises(CancelledError):
        cancelled.result()
    database.write_soon(_add("later")).result(TIMEOUT_SECONDS)
    assert _names(database) == ["kept", "later"]


def test_close_finishes_queued_writes_and_refuses_later_ones(
    database: Database, open_database: Callable[..., Database]
) -> None:
    gate = Gate(database)
    pending = database.write_soon(_add("pending"))
    closer = threading.Thread(target=database.close)
    closer.start()
    gate.open()
    closer.join()
    assert pending.done()
    with pytest.raises(StoreUnavailable, match="closed"):
        database.write(_add("late"))
    database.close()
    assert _names(open_database()) == ["pending"]


def test_failing_read_raises_store_error(database: Database) -> None:
    with pytest.raises(StoreUnavailable):
        database.read(lambda db: db.exec_driver_sql("SELECT * FROM nothing").all())
    assert _names(database) == []


def test_locked_store_raises_store_busy(
    database: Database, open_database: Callable[..., Database]
) -> None:
    hasty = open_database(busy_seconds=0.05)
    with database.begin(), pytest.raises(StoreBusy, match="try again"):
        hasty.write(_add("hasty"))
    hasty.write(_add("calm"))
    assert _names(database) == ["calm"]


def test_text_that_cannot_be_stored_raises_invalid_input(database: Database) -> None:
    tenant = add_tenant(database)
    if database.is_sqlite:
        assert add_session(database, tenant, display_name="a\0b").display_name == "a\0b"
        return
    for fields in ({"display_name": "a\0b"}, {"user_metadata": {"k": "\0"}}):
        with pytest.raises(InvalidInput, match="a value cannot be stored"):
            add_session(database, tenant, **fields)
    assert count(database, schema.sessions) == 0


def test_full_sqlite_store_raises_store_full_and_recovers(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    migrate(database)
    database.engine.dispose()
    sa.event.listen(
        database.engine, "connect", lambda db, _: db.execute("PRAGMA max_page_count = 200").close()
    )
    with pytest.raises(StoreFull, match="free space"):
        database.write(lambda db: settings.put(db, "big", "x" * 2_000_000))
    database.write(lambda db: settings.put(db, "small", "x"))
    assert database.read(lambda db: settings.get(db, "big")) is None
    assert database.read(lambda db: db.exec_driver_sql("PRAGMA integrity_check").scalar()) == "ok"
    database.close()


def test_driver_error_fails_one_write_and_keeps_the_writer_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    migrate(database)

    def fail(db: sa.Connection, busy_seconds: float) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr("tinkex.store.database._begin_immediate", fail)
        with pytest.raises(StoreFull):
            database.write_soon(lambda db: settings.put(db, "a", 1)).result(20)
    database.write_soon(lambda db: settings.put(db, "a", 2)).result(20)
    database.close()


def test_lost_connection_fails_one_write(
    database: Database, open_database: Callable[..., Database]
) -> None:
    if database.is_sqlite:
        # It has no connections that could be lost.
        return
    other = open_database()

    def lose_connection(db: sa.Connection) -> None:
        own = db.scalar(sa.text("SELECT pg_backend_pid()"))
        other.read(lambda other_db: other_db.scalar(sa.text(f"SELECT pg_terminate_backend({own})")))
        keys.get_or_create_tenant(db, "lost", NOW)

    with pytest.raises(StoreUnavailable):
        database.write(lose_connection)
    database.write(_add("next"))
    assert _names(database) == ["next"]


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("nonsense", "expected sqlite:///PATH or postgresql://"),
        ("sqlite://", "it needs a file"),
        ("sqlite:///:memory:", "it needs a file"),
        ("mysql://localhost/x", "begins with sqlite:/// or postgresql://"),
    ],
)
def test_invalid_url_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Database(url)


def test_unreachable_server_raises_store_unavailable() -> None:
    database = Database("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        database.read(lambda db: db.scalar(sa.text("SELECT 1")))
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        database.write(lambda db: db.scalar(sa.text("SELECT 1")))
    database.close()
