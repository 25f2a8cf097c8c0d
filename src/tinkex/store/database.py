"""Database access: reads on any thread, writes on one thread that commits them in groups.

A write is done when its transaction is on disk. Writes that arrive during a commit form the next
group, so that many clients share the cost of one commit. `write_locks` describes which writes of
several processes exclude each other.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPICursor

from tinkex.errors import ConfigError, StoreUnavailable
from tinkex.store import accounting
from tinkex.store.dialects import as_store_error, is_conflict
from tinkex.store.write_locks import EXCLUSIVE, WriteLocks

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Connection: TypeAlias = sa.Connection
"""The connection type, exported so that other packages need not import SQLAlchemy."""
TransactionWork: TypeAlias = Callable[[sa.Connection], T]

#: Maximum number of writes per commit.
MAX_WRITES_PER_COMMIT = 64
#: How long a write waits for other processes.
LOCK_TIMEOUT_SECONDS = 5.0
#: Interval of SQLite's lock retries.
_LOCK_RETRY_SECONDS = 0.0005
#: PostgreSQL ends a transaction whose client sends nothing for this long.
IDLE_TRANSACTION_SECONDS = 15.0
#: How often a transaction is tried that deadlocks with another, and the longest pause between.
MAX_TRIES = 4
_CONFLICT_PAUSE_SECONDS = 0.05
#: A dead connection to PostgreSQL is noticed after about 10 + 2 * 5 seconds.
_KEEPALIVE_OPTIONS = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}
#: Settings of a new SQLite file; the first must precede the first table.
_FILE_PRAGMAS = ("auto_vacuum = INCREMENTAL", "journal_mode = WAL")
#: Settings of every connection; the last one truncates a large log.
_CONNECTION_PRAGMAS = (
    "synchronous = FULL",
    "foreign_keys = ON",
    "temp_store = MEMORY",
    f"journal_size_limit = {16 * 2**20}",
)
#: Pool size; opening a connection costs more than most queries. PostgreSQL servers allow few
#: connections, which all processes of a store share.
_MAX_SQLITE_CONNECTIONS = 24
MAX_POSTGRESQL_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class _QueuedWrite(Generic[T_co]):
    work: TransactionWork[T_co]
    future: Future[T_co]
    locks: WriteLocks


class Database:
    """A database by URL, e.g. `sqlite:////home/me/.tinkex/store.db` or `postgresql://...`."""

    def __init__(
        self,
        url: str,
        *,
        busy_seconds: float = LOCK_TIMEOUT_SECONDS,
        max_connections: int = MAX_POSTGRESQL_CONNECTIONS,
    ) -> None:
        """`max_connections` limits the connections to PostgreSQL; more queries wait."""
        self.engine = _create_engine(url, busy_seconds, max_connections)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self._busy_seconds = busy_seconds
        self._queue: queue.SimpleQueue[_QueuedWrite[object] | None] = queue.SimpleQueue()
        self._put_back: deque[_QueuedWrite[object] | None] = deque(maxlen=1)
        """Taken from the queue, but does not fit into the current group."""
        self._writer: threading.Thread | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def read(self, work: TransactionWork[T]) -> T:
        """Run a read-only function on this thread."""
        try:
            with self.engine.connect() as db:
                return work(db)
        except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
            raise as_store_error(error) from error

    def write(self, work: TransactionWork[T], locks: WriteLocks = EXCLUSIVE) -> T:
        """Run a function in a write transaction and wait for the commit."""
        return self.write_soon(work, locks).result()

    def write_soon(self, work: TransactionWork[T], locks: WriteLocks = EXCLUSIVE) -> Future[T]:
        """Queue a function for a write transaction; the future is done after the commit.

        Writes take effect in call order. A write can be cancelled until it starts. It may run more
        than once: a transaction that conflicts with another is rolled back and repeated.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                future.set_exception(StoreUnavailable("the server's database is closed"))
                return future
            if self._writer is None:
                self._writer = threading.Thread(
                    target=self._writer_loop, name="store-writer", daemon=True
                )
                self._writer.start()
            queued: _QueuedWrite[T] = _QueuedWrite(work, future, locks)
            self._queue.put(queued)
        return future

    def close(self) -> None:
        """Finish queued writes and close the connections; later writes fail."""
        with self._lock:
            self._is_closed = True
            self._queue.put(None)
        if self._writer is not None:
            self._writer.join()
        self.engine.dispose()

    def _writer_loop(self) -> None:
        while True:
            first = self._put_back.pop() if self._put_back else self._queue.get()
            if first is None:
                return
            group, locks = self._collect_group(first)
            started = [item for item in group if item.future.set_running_or_notify_cancel()]
            if started:
                self._commit_group(started, locks)

    def _collect_group(
        self, first: _QueuedWrite[object]
    ) -> tuple[list[_QueuedWrite[object]], WriteLocks]:
        """Return the next writes that can share a commit, and their locks."""
        group, locks = [first], first.locks
        while len(group) < MAX_WRITES_PER_COMMIT:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is None or not (self.is_sqlite or locks.can_share_commit(item.locks)):
                self._put_back.append(item)
                break
            group.append(item)
            locks |= item.locks
        return group, locks

    def _commit_group(self, group: list[_QueuedWrite[object]], locks: WriteLocks) -> None:
        """Run a group in one transaction; a failed write is rolled back alone."""
        try:
            outcomes = self._run_group(group, locks)
        except (sa.exc.SQLAlchemyError, sqlite3.Error) as error:
            if is_conflict(error) and len(group) > 1:
                # One of them may conflict again and again; it must not stop the others.
                for item in group:
                    self._commit_group([item], item.locks)
                return
            # Driver errors too: without the writer thread later writes would wait for ever.
            for item in group:
                item.future.set_exception(as_store_error(error))
            return
        for item, (result, failure) in zip(group, outcomes, strict=True):
            if failure is not None:
                item.future.set_exception(failure)
            else:
                item.future.set_result(result)

    def _run_group(
        self, group: list[_QueuedWrite[object]], locks: WriteLocks
    ) -> list[tuple[object, Exception | None]]:
        """Run a group in one transaction, again if it conflicts with another transaction."""
        for number in range(MAX_TRIES):
            try:
                with self.begin(locks) as db:
                    return [_run_in_savepoint(db, item.work) for item in group]
            except sa.exc.DBAPIError as error:
                if not is_conflict(error) or number == MAX_TRIES - 1:
                    raise
            time.sleep(random.uniform(0.0, _CONFLICT_PAUSE_SECONDS))
        raise AssertionError("the last try returns or raises")

    @contextlib.contextmanager
    def begin(self, locks: WriteLocks = EXCLUSIVE) -> Iterator[sa.Connection]:
        """Open a write transaction; exclusive ones see all others' commits in order."""
        with self.engine.connect() as db:
            if self.is_sqlite:
                _begin_immediate(db, self._busy_seconds)
            else:
                locks.acquire(
                    db, lock_seconds=self._busy_seconds, idle_seconds=IDLE_TRANSACTION_SECONDS
                )
            with accounting.collect_usage(db):
                yield db
            db.commit()


def _begin_immediate(db: sa.Connection, busy_seconds: float) -> None:
    """Wait for the write lock of SQLite.

    SQLite's own busy handler backs off up to 100 ms, but transactions here take about 1 ms, so this
    disables it and retries quickly.
    """
    ends_at = time.monotonic() + busy_seconds
    db.begin()
    cursor = db.connection.cursor()
    cursor.execute("PRAGMA busy_timeout = 0")
    try:
        while not _try_begin(cursor, is_last=time.monotonic() >= ends_at):
            time.sleep(_LOCK_RETRY_SECONDS)
    finally:
        cursor.execute(f"PRAGMA busy_timeout = {round(busy_seconds * 1000)}")
        cursor.close()


def _try_begin(cursor: DBAPICursor, *, is_last: bool) -> bool:
    """Return whether the transaction began; the last try raises instead of returning False."""
    try:
        cursor.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if is_last or "locked" not in str(error):
            raise sa.exc.OperationalError("BEGIN IMMEDIATE", None, error) from error
        return False
    return True


def _run_in_savepoint(
    db: sa.Connection, work: TransactionWork[object]
) -> tuple[object, Exception | None]:
    savepoint = db.begin_nested()
    usage = accounting.collected_usage(db)
    num_before = len(usage)
    try:
        result = work(db)
    except Exception as error:
        if is_conflict(error) or db.invalidated:
            # The whole transaction is repeated, because other writes of it hold locks, too, or has
            # ended with its connection.
            raise
        _rollback(savepoint, error)
        del usage[num_before:]
        return None, as_store_error(error) if isinstance(error, sa.exc.DBAPIError) else error
    savepoint.commit()
    return result, None


def _rollback(savepoint: sa.NestedTransaction, cause: Exception) -> None:
    """Roll back one write. If that fails, the database has dropped the whole group."""
    try:
        savepoint.rollback()
    except sa.exc.SQLAlchemyError as error:
        raise (cause if isinstance(cause, sa.exc.SQLAlchemyError) else error) from None


def redact_url(url: str) -> str:
    """Return a database URL without its password."""
    return sa.make_url(url).render_as_string(hide_password=True)


def _create_engine(url: str, busy_seconds: float, max_connections: int) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise ConfigError(
            f"store is {url!r}; expected sqlite:///PATH or postgresql://USER@HOST/NAME"
        ) from None
    if parsed.get_backend_name() == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise ConfigError(f"store is {url!r}; processes share it, so it needs a file")
        return _create_sqlite(parsed, busy_seconds)
    if parsed.get_backend_name() != "postgresql":
        raise ConfigError(
            f"store is {parsed!r}; expected a URL that begins with sqlite:/// or postgresql://"
        )
    return _create_postgresql(parsed, max_connections)


def _create_postgresql(url: sa.URL, max_connections: int) -> sa.Engine:
    # Psycopg 3 is installed; SQLAlchemy's default driver is an older one. The isolation level is
    # that of the locks: a statement must see what was committed while it waited.
    return sa.create_engine(
        url.set(drivername="postgresql+psycopg"),
        pool_size=max_connections,
        max_overflow=0,
        pool_pre_ping=True,
        isolation_level="READ COMMITTED",
        connect_args=_KEEPALIVE_OPTIONS,
    )


def _initialize_file(cursor: sqlite3.Cursor, busy_seconds: float) -> None:
    """Initialize a new file; retries, because several processes may do so at once."""
    ends_at = time.monotonic() + busy_seconds
    while cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            for pragma in _FILE_PRAGMAS:
                cursor.execute(f"PRAGMA {pragma}")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= ends_at:
                raise
            time.sleep(_LOCK_RETRY_SECONDS)


def _create_sqlite(url: sa.URL, busy_seconds: float) -> sa.Engine:
    # The data of tenants is private; SQLite gives its log the same mode.
    with contextlib.suppress(OSError):
        os.close(os.open(str(url.database), os.O_CREAT | os.O_RDWR, 0o600))
    engine = sa.create_engine(
        url,
        pool_size=_MAX_SQLITE_CONNECTIONS,
        max_overflow=0,
        connect_args={"check_same_thread": False, "timeout": busy_seconds},
    )

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _record: object) -> None:
        # Transactions are begun explicitly: the driver would begin late and read stale rows.
        connection.isolation_level = None
        cursor = connection.cursor()
        _initialize_file(cursor, busy_seconds)
        for pragma in _CONNECTION_PRAGMAS:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return engine
