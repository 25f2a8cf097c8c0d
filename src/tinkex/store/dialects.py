"""What SQLite and PostgreSQL both can, and SQLAlchemy spells twice."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite


def insert_into(db: sa.Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """An insert that can say what happens when the row is there already."""
    if db.dialect.name == "sqlite":
        return sqlite.insert(table)
    return postgresql.insert(table)
