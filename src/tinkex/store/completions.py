"""Samples that are over, per sampling client, for whoever waits for many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from tinkex.store.schema import completions


class SampleCompletion(NamedTuple):
    """A sample that is over; no size is a failure."""

    job_id: str
    result_bytes: int | None


def list_completions(
    db: sa.Connection, sampler_id: str, clone: int, cursor: int, limit: int
) -> tuple[list[SampleCompletion], int]:
    """What came after the cursor, in its order, and the cursor after that."""
    query = (
        sa.select(completions.c.no, completions.c.job_id, completions.c.result_bytes)
        .where(
            completions.c.sampler_id == sampler_id,
            completions.c.clone == clone,
            completions.c.no > cursor,
        )
        .order_by(completions.c.no)
        .limit(limit)
    )
    rows = db.execute(query).all()
    return [SampleCompletion(row.job_id, row.result_bytes) for row in rows], (
        rows[-1].no if rows else cursor
    )


def delete_completions(db: sa.Connection, sampler_id: str, job_ids: Sequence[str]) -> None:
    """Forget completions that their client has seen."""
    db.execute(
        sa.delete(completions).where(
            completions.c.sampler_id == sampler_id, completions.c.job_id.in_(job_ids)
        )
    )
