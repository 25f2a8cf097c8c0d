"""What was done and what was used."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

from tinkex import clock, types
from tinkex.server.call import Handler, RequestContext, Services
from tinkex.server.consumption import (
    GIGABYTE,
    parse_hour_range,
    serialize_usage,
    sum_storage,
    sum_usage,
)
from tinkex.server.describe import stringify_metadata, to_datetime
from tinkex.server.transactions import read
from tinkex.store import audit, checkpoints, sessions, usage
from tinkex.store.database import Connection
from tinkex.store.records import AuditRecord, CheckpointRecord, SessionRecord
from tinkex.types.billing import QuotaUsage, QuotaUsageResponse

#: Events of the audit log by the filter that shows them.
EVENTS_BY_FILTER: dict[str, tuple[str, ...]] = {
    "checkpoints": (
        "checkpoint_saved",
        "checkpoint_loaded",
        "checkpoint_copied",
        "checkpoint_downloaded",
        "checkpoint_published",
        "checkpoint_unpublished",
        "checkpoint_ttl_set",
        "checkpoint_deleted",
    ),
    "projects": ("project_assigned",),
    "teams": (),
    "organizations": ("session_created", "session_finished", "api_key_created", "api_key_revoked"),
}
MAX_ENTRIES = 10_000
DAY_SECONDS = 24 * 3600
_PAGE_SIZE = 1000


async def audit_log(services: Services, context: RequestContext[Any]) -> types.AuditLogResponse:
    """What the caller's tenant did on one day, in order; today unless another is named."""
    day = context.query.get("day")
    asked = date.fromisoformat(day) if day else datetime.fromtimestamp(clock.now(), UTC).date()
    start = datetime.combine(asked, datetime.min.time(), UTC).timestamp()
    events = EVENTS_BY_FILTER.get(context.query.get("event_type", "all"))

    def look(db: Connection) -> list[AuditRecord]:
        return audit.list_audit(
            db,
            context.tenant_id,
            since=start,
            until=start + DAY_SECONDS,
            events=events,
            limit=MAX_ENTRIES,
        )

    found = await read(services, look)
    return types.AuditLogResponse(
        entries=[_serialize_audit_entry(entry) for entry in reversed(found)]
    )


def _serialize_audit_entry(entry: AuditRecord) -> types.AuditLogEntry:
    return types.AuditLogEntry(
        timestamp=to_datetime(entry.at),
        event=entry.event,
        event_details=dict(entry.details),
        model_id=entry.run_id,
        tinker_path=entry.tinker_path,
    )


async def billing_usage(
    services: Services, context: RequestContext[Any]
) -> types.BillingUsageResponse:
    """What the caller used, by the hour, and what its checkpoints took."""
    span = parse_hour_range(context.query.get("starting_on"), context.query.get("ending_before"))
    tenant_id = context.tenant_id

    def look(db: Connection) -> types.BillingUsageResponse:
        rows = usage.list_usage(db, tenant_id, span.start, span.end)
        stored = sum_storage(_list_checkpoints(db, tenant_id), span, clock.now())
        uses = sorted(
            (*sum_usage(rows).values(), *stored), key=lambda use: (use.hour, use.session_id)
        )
        known = _find_sessions(db, tenant_id, {use.session_id for use in uses})
        events = [
            serialize_usage(use, tenant_id, known[use.session_id].project_id)
            if use.session_id in known
            else serialize_usage(use, tenant_id, None)
            for use in uses
        ]
        return types.BillingUsageResponse(
            data=events,
            sessions={
                session_id: types.BillingUsageSession(
                    user_metadata=stringify_metadata(session.user_metadata)
                )
                for session_id, session in known.items()
            },
        )

    return await read(services, look)


def _list_checkpoints(db: Connection, tenant_id: str) -> list[CheckpointRecord]:
    """All checkpoints of a tenant that are still there."""
    now = clock.now()
    found: list[CheckpointRecord] = []
    while True:
        page, total = checkpoints.list_page(
            db, tenant_id, limit=_PAGE_SIZE, offset=len(found), now=now
        )
        found += page
        if not page or len(found) >= total:
            return found


def _find_sessions(
    db: Connection, tenant_id: str, session_ids: set[str]
) -> dict[str, SessionRecord]:
    found = (sessions.find(db, session_id) for session_id in sorted(session_ids) if session_id)
    return {
        session.id: session
        for session in found
        if session is not None and session.tenant_id == tenant_id
    }


async def storage_usage(
    services: Services, context: RequestContext[Any]
) -> types.CurrentCheckpointStorageUsageResponse:
    """What the caller's checkpoints take now, by project."""
    project_id = context.query.get("project_id")
    found = await read(
        services,
        lambda db: checkpoints.storage_by_project(db, context.tenant_id, project_id, clock.now()),
    )
    items = [
        types.CurrentCheckpointStorageUsageItem(
            project_id=row.project_id,
            org_user_urn=context.identity.urn,
            checkpoint_count=row.num_checkpoints,
            size_bytes=row.num_bytes,
            size_gigabytes=row.num_bytes / GIGABYTE,
        )
        for row in found
    ]
    return types.CurrentCheckpointStorageUsageResponse(data=items)


async def get_quotas(services: Services, context: RequestContext[Any]) -> QuotaUsageResponse:
    """What the caller's tenant may have, and what it has."""
    found = await read(
        services, lambda db: services.quotas.list_usage(db, context.tenant_id, clock.now())
    )
    return QuotaUsageResponse(
        quotas=[QuotaUsage(name=use.name, used=use.used, limit=use.limit or None) for use in found]
    )


ROUTES: dict[str, Handler] = {
    "get_quotas": get_quotas,
    "get_audit_log": audit_log,
    "get_billing_usage": billing_usage,
    "get_current_checkpoint_storage_usage": storage_usage,
}
