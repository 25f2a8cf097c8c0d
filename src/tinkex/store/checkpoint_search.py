"""Search of checkpoints by project, metadata, kind and base model."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

import sqlalchemy as sa

from tinkex import types
from tinkex.ids import SEGMENT_BY_TYPE
from tinkex.store.checkpoints import NEWEST_FIRST, is_listed
from tinkex.store.dialects import has_metadata
from tinkex.store.records import CheckpointRecord
from tinkex.store.schema import checkpoints


class CheckpointSearchPage(NamedTuple):
    """A page of results, and the cursor of the next one; None after the last."""

    checkpoints: list[CheckpointRecord]
    next_cursor: types.CheckpointSearchCursor | None


def search(
    db: sa.Connection,
    tenant_id: str,
    owner_urn: str,
    request: types.CheckpointSearchRequest,
    now: float,
) -> CheckpointSearchPage:
    """Return a page of a tenant's matching checkpoints; `owner_urn` is the tenant's public name."""
    owner = request.owner
    # This server has no teams: a tenant searches only its own checkpoints.
    is_other = isinstance(owner, types.UserSearchOwner) and owner_urn not in owner.owner_urns
    if is_other or request.base_models == [] or request.project_ids == []:
        return CheckpointSearchPage([], None)
    query = (
        sa.select(checkpoints)
        .where(checkpoints.c.tenant_id == tenant_id, is_listed(now), *_conditions(db, request))
        .order_by(*NEWEST_FIRST)
        .limit(request.limit + 1)
    )
    if request.cursor is not None:
        query = query.where(_is_after(request.cursor, tenant_id))
    records = [CheckpointRecord.from_row(row) for row in db.execute(query)]
    page = records[: request.limit]
    return CheckpointSearchPage(page, _cursor_after(page[-1]) if len(records) > len(page) else None)


def _conditions(
    db: sa.Connection, request: types.CheckpointSearchRequest
) -> list[sa.ColumnElement[bool]]:
    conditions = [
        has_metadata(db, checkpoints.c.user_metadata, key, value)
        for key, value in request.user_metadata.items()
    ]
    if request.project_ids is not None:
        conditions.append(checkpoints.c.project_id.in_(request.project_ids))
    if request.base_models is not None:
        conditions.append(checkpoints.c.base_model.in_(request.base_models))
    if request.checkpoint_type is not None:
        conditions.append(checkpoints.c.segment == SEGMENT_BY_TYPE[request.checkpoint_type])
    return conditions


def _cursor_after(checkpoint: CheckpointRecord) -> types.CheckpointSearchCursor:
    return types.CheckpointSearchCursor(
        last_created_at=datetime.fromtimestamp(checkpoint.created_at, UTC),
        last_checkpoint_uuid=checkpoint.id,
    )


def _is_after(cursor: types.CheckpointSearchCursor, tenant_id: str) -> sa.ColumnElement[bool]:
    # The cursor's time is rounded, so the checkpoint's own time is preferred.
    last = checkpoints.alias("last")
    known = sa.select(last.c.created_at).where(
        last.c.id == cursor.last_checkpoint_uuid, last.c.tenant_id == tenant_id
    )
    saved_at = sa.func.coalesce(known.scalar_subquery(), cursor.last_created_at.timestamp())
    return sa.or_(
        checkpoints.c.created_at < saved_at,
        sa.and_(
            checkpoints.c.created_at == saved_at,
            checkpoints.c.id < cursor.last_checkpoint_uuid,
        ),
    )
