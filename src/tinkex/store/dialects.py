"""Differences between SQLite and PostgreSQL: upserts, JSON and error messages."""

from __future__ import annotations

import sqlite3
from functools import cache

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tinkex.errors import InvalidInput, StoreBusy, StoreFull, StoreUnavailable, TinkexError


def insert_or_ignore(
    db: sa.Connection,
    table: sa.Table,
    *columns: str,
    returning: tuple[sa.Column[object], ...] = (),
) -> sa.Executable:
    """Return an insert that does nothing if a row with the same values in `columns` exists."""
    return _build_insert_or_ignore(db.dialect.name, table, columns, returning)


# Cached, because building a statement takes longer than running it.
@cache
def _build_insert_or_ignore(
    dialect: str,
    table: sa.Table,
    columns: tuple[str, ...],
    returning: tuple[sa.Column[object], ...],
) -> sa.Executable:
    statement = dialect_insert(dialect, table).on_conflict_do_nothing(index_elements=columns)
    return statement.returning(*returning) if returning else statement


def dialect_insert(dialect: str, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """Return the dialect's insert, which supports ON CONFLICT."""
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)


def has_metadata(
    db: sa.Connection, column: sa.Column[object], key: str, value: str
) -> sa.ColumnElement[bool]:
    """Return a condition: a JSON object in a column has this key with this text."""
    if db.dialect.name != "sqlite":
        return sa.type_coerce(column, postgresql.JSONB).contains({key: value})
    # Not a path expression: those cannot express every key.
    entry = sa.func.json_each(column).table_valued("key", "type", "value")
    return sa.exists().where(entry.c.key == key, entry.c.type == "text", entry.c.value == value)


def lock_rows(db: sa.Connection, query: sa.Select[object]) -> None:
    """Lock the selected rows in the order of the query. SQLite has no other writer.

    Transactions that lock the same rows in the same order do not deadlock.
    """
    if db.dialect.name != "sqlite":
        db.execute(query.with_for_update()).all()


#: SQLSTATEs of transactions that succeed when they are repeated: serialization failure, deadlock.
_CONFLICT_STATES = frozenset({"40001", "40P01"})


def is_conflict(error: BaseException) -> bool:
    """Return whether a transaction failed only because of another one, so that it is repeated."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    return getattr(cause, "sqlstate", None) in _CONFLICT_STATES


_DISK_FULL_TEXTS = (
    "database or disk is full",
    "no space left",
    "disk i/o error",
    "could not extend file",
)
_BUSY_TEXTS = (
    "database is locked",
    "database table is locked",
    "deadlock detected",
    "lock timeout",
)


def as_store_error(error: sa.exc.SQLAlchemyError | sqlite3.Error) -> TinkexError:
    """Convert a database error to a TinkexError."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    first = str(cause).partition("\n")[0]
    text = first.lower()
    if any(part in text for part in _DISK_FULL_TEXTS):
        # SQLite reports an I/O error if there is no space for its log.
        return StoreFull("the disk of the server is full or broken; free space, then try again")
    if isinstance(error, sa.exc.TimeoutError) or any(part in text for part in _BUSY_TEXTS):
        return StoreBusy("the server's database is busy; try again")
    if isinstance(error, sa.exc.DataError):
        return InvalidInput(f"a value cannot be stored: {first}")
    if isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError):
        return StoreUnavailable(f"the server's database cannot be used: {first}")
    return StoreUnavailable(f"the server's database refused: {first}")
