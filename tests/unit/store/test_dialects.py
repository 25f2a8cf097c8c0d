"""Conversion of database errors."""

from __future__ import annotations

import sqlite3

import pytest
import sqlalchemy as sa

from tinkex.errors import InvalidInput, StoreBusy, StoreFull, StoreUnavailable, TinkexError
from tinkex.store.dialects import as_store_error


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("database or disk is full", StoreFull),
        ("disk I/O error", StoreFull),
        ('could not extend file "base/1/2": No space left on device\nHINT: Check', StoreFull),
        ("database is locked", StoreBusy),
        ("deadlock detected\nDETAIL: Process 1 waits", StoreBusy),
        ("canceling statement due to lock timeout", StoreBusy),
        ("connection refused\nIs the server running?", StoreUnavailable),
        ("server closed the connection unexpectedly", StoreUnavailable),
    ],
)
def test_database_errors_are_retryable(text: str, meaning: type[TinkexError]) -> None:
    error = as_store_error(sa.exc.OperationalError("SELECT 1", {}, sqlite3.OperationalError(text)))
    assert type(error) is meaning
    assert error.retryable
    assert "\n" not in error.message


def test_unstorable_value_raises_invalid_input() -> None:
    cause = ValueError("text fields cannot contain NUL (0x00) bytes")
    error = as_store_error(sa.exc.DataError("INSERT", {}, cause))
    assert isinstance(error, InvalidInput)
    assert "NUL" in error.message
    assert not error.retryable


def test_error_contains_no_statement_or_values() -> None:
    cause = sqlite3.IntegrityError("UNIQUE constraint failed: jobs.id")
    error = as_store_error(sa.exc.IntegrityError("INSERT secret", {"key": "tml-secret"}, cause))
    assert isinstance(error, StoreUnavailable)
    assert error.message == "the server's database refused: UNIQUE constraint failed: jobs.id"


def test_exhausted_pool_raises_store_busy() -> None:
    assert isinstance(as_store_error(sa.exc.TimeoutError("QueuePool limit reached")), StoreBusy)
