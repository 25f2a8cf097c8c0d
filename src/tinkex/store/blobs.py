"""Places in the object store: which rows name them, and which wait for their removal."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from tinkex.store.schema import checkpoints, jobs, runs, unused_blobs


def mark_unused(db: sa.Connection, places: sa.Select[str]) -> None:
    """Queue the selected places for removal; no row may name them after this transaction."""
    db.execute(sa.insert(unused_blobs).from_select(["place"], places))


def mark_place_unused(db: sa.Connection, place: str) -> None:
    """Queue a place for removal; no row may name it after this transaction."""
    db.execute(sa.insert(unused_blobs).values(place=place))


def select_payloads(is_wanted: sa.ColumnElement[bool]) -> sa.Select[str]:
    """Select the places of payloads of jobs."""
    return sa.select(jobs.c.payload_ref).where(is_wanted, jobs.c.payload_ref.is_not(None))


def list_unused(db: sa.Connection, limit: int) -> list[str]:
    """Return places that wait for their removal."""
    return list(db.scalars(sa.select(unused_blobs.c.place).limit(limit)))


def delete_unused(db: sa.Connection, places: Collection[str]) -> None:
    """Forget places whose objects are removed."""
    db.execute(sa.delete(unused_blobs).where(unused_blobs.c.place.in_(places)))


def list_known(db: sa.Connection, places: Collection[str]) -> set[str]:
    """Return which of these places a row names."""
    columns = (checkpoints.c.place, runs.c.snapshot, jobs.c.payload_ref, unused_blobs.c.place)
    return {
        place
        for column in columns
        for place in db.scalars(sa.select(column).where(column.in_(places)))
    }
