"""Stored responses of idempotency keys, so that a repeated request has no second effect."""

from __future__ import annotations

import sqlalchemy as sa

from tinkex.store.dialects import insert_or_ignore
from tinkex.store.schema import repeats


def find_response(db: sa.Connection, tenant_id: str, endpoint: str, key: str) -> str | None:
    """Return the stored response of an idempotency key."""
    return db.scalar(
        sa.select(repeats.c.answer).where(
            repeats.c.tenant_id == tenant_id,
            repeats.c.endpoint == endpoint,
            repeats.c.key == key,
        )
    )


def save_response(
    db: sa.Connection, tenant_id: str, endpoint: str, key: str, answer: str, now: float
) -> None:
    """Store a response; an existing one is kept."""
    values = {
        "tenant_id": tenant_id,
        "endpoint": endpoint,
        "key": key,
        "answer": answer,
        "created_at": now,
    }
    db.execute(insert_or_ignore(db, repeats, "tenant_id", "endpoint", "key"), values)
