"""What idempotency keys were answered with, so that a repeated request makes nothing twice."""

from __future__ import annotations

import sqlalchemy as sa

from tinkex.store.dialects import insert_or_ignore
from tinkex.store.schema import repeats


def find_response(db: sa.Connection, tenant_id: str, endpoint: str, key: str) -> str | None:
    """What this request was answered with before."""
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
    """Keep an answer; the first one holds."""
    values = {
        "tenant_id": tenant_id,
        "endpoint": endpoint,
        "key": key,
        "answer": answer,
        "created_at": now,
    }
    db.execute(insert_or_ignore(db, repeats, "tenant_id", "endpoint", "key"), values)
