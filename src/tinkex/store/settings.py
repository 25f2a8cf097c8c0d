"""Named settings of a store, such as its secret."""

from __future__ import annotations

import secrets

import sqlalchemy as sa

from tinkex.ids import new_id
from tinkex.store.dialects import dialect_insert
from tinkex.store.schema import settings

_SECRET_NAME = "secret"
_BLOBS_URL_NAME = "blobs"
_SECRET_BYTES = 32


def get(db: sa.Connection, name: str) -> object:
    """Return a setting, or None."""
    return db.scalar(sa.select(settings.c.value).where(settings.c.name == name))


def put(db: sa.Connection, name: str, value: object) -> None:
    """Set a setting."""
    statement = dialect_insert(db.dialect.name, settings).values(name=name, value=value)
    db.execute(statement.on_conflict_do_update(index_elements=["name"], set_={"value": value}))


def get_or_create_secret(db: sa.Connection) -> bytes:
    """Return the signing secret, generated on first use. Call it in a write transaction."""
    secret = get(db, _SECRET_NAME)
    if secret is None:
        secret = secrets.token_hex(_SECRET_BYTES)
        put(db, _SECRET_NAME, secret)
    return bytes.fromhex(str(secret))


def get_or_create_store_id(db: sa.Connection) -> str:
    """Return the unique id of this store, generated once. Call it in a write transaction."""
    store_id = get(db, "store_id")
    if store_id is None:
        store_id = new_id()
        put(db, "store_id", store_id)
    return str(store_id)


def get_blobs_url(db: sa.Connection) -> str:
    """Return the URL of the object store that has the files of this store; empty if none has."""
    return str(get(db, _BLOBS_URL_NAME) or "")


def set_blobs_url(db: sa.Connection, url: str) -> None:
    """Record the URL of the object store."""
    put(db, _BLOBS_URL_NAME, url)
