"""What SQLite and PostgreSQL both can, and SQLAlchemy spells twice."""

from __future__ import annotations

from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite


def insert_or_ignore(
    db: sa.Connection,
    table: sa.Table,
    *columns: str,
    returning: tuple[sa.Column[Any], ...] = (),
) -> sa.Executable:
    """An insert that does nothing where a row with the same values in these columns exists."""
    return _build_insert_or_ignore(db.dialect.name, table, columns, returning)


# Building a statement takes longer than running it, so these are kept.
@cache
def _build_insert_or_ignore(
    dialect: str,
    table: sa.Table,
    columns: tuple[str, ...],
    returning: tuple[sa.Column[Any], ...],
) -> sa.Executable:
    statement = dialect_insert(dialect, table).on_conflict_do_nothing(index_elements=columns)
    return statement.returning(*returning) if returning else statement


def dialect_insert(dialect: str, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """An insert that can say what happens when the row is there already."""
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
