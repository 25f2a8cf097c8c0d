"""Facts about this store as a whole, by name."""

from __future__ import annotations

import secrets
from typing import Any

import sqlalchemy as sa

from tinkex.ids import new_id
from tinkex.store.dialects import dialect_insert
from tinkex.store.schema import settings

_SECRET_NAME = "secret"
_SECRET_BYTES = 32


def get(db: sa.Connection, name: str) -> Any | None:
    """A fact; None if nobody has put it."""
    return db.scalar(sa.select(settings.c.value).where(settings.c.name == name))


def put(db: sa.Connection, name: str, value: Any) -> None:
    """Store a fact; the newest holds."""
    statement = dialect_insert(db.dialect.name, settings).values(name=name, value=value)
    db.execute(statement.on_conflict_do_update(index_elements=["name"], set_={"value": value}))


def get_or_create_secret(db: sa.Connection) -> bytes:
    """What this store signs with: random, made by the first who asks. Call it inside a write."""
    known = get(db, _SECRET_NAME)
    if known is None:
        known = secrets.token_hex(_SECRET_BYTES)
        put(db, _SECRET_NAME, known)
    return bytes.fromhex(known)


def get_or_create_store_id(db: sa.Connection) -> str:
    """What tells this store from all others, made once; call it inside a write."""
    known = get(db, "store_id")
    if known is None:
        known = new_id()
        put(db, "store_id", known)
    return str(known)
