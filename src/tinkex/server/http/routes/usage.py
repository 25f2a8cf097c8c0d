"""Usage endpoints: hourly usage and storage, quotas and the audit log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from tinkex import clock, types
from tinkex.errors import UnprocessableEntityError
from tinkex.server.http.request_context import Handler, RequestContext, Services
from tinkex.server.http.serializers import stringify_metadata, to_datetime
from tinkex.server.http.store_access import read
from tinkex.store import accounting, checkpoints, sessions
from tinkex.store.database import Connection
from tinkex.store.records import AuditRecord, CheckpointRecord, SessionRecord, UsageRecord
from tinkex.types.billing import BillingEventInfo, QuotaUsage, QuotaUsageResponse

HOUR_SECONDS = 3600
MAX_RANGE = timedelta(days=14)
GIGABYTE = 10**9

_EVENT_BUILDERS: Mapping[str, Callable[[int], BillingEventInfo]] = {
    "training": lambda amount: types.TrainingBillingEvent(token_count=amount),
    "prefill": lambda amount: types.SamplingPrefillBillingEvent(cached=False, token_count=amount),
    "prefill_cached": lambda amount: types.SamplingPrefillBillingEvent(
        cached=True, token_count=amount
    ),
    "sample": lambda amount: types.SamplingSampleBillingEvent(token_count=amount),
    "checkpoint": lambda amount: types.CheckpointBillingEvent(count=amount),
}


class HourRange(NamedTuple):
    """A range of full hours, in seconds since 1970."""

    start: float
    end: float


def parse_hour_range(starting_on: str | None, ending_before: str | None) -> HourRange:
    """Parse the range of a request: full hours, at most 14 days."""
    start = _parse_hour("starting_on", starting_on)
    end = _parse_hour("ending_before", ending_before)
    if not timedelta(0) < end - start <= MAX_RANGE:
        raise UnprocessableEntityError(
            f"the range is {starting_on} to {ending_before}; expected up to {MAX_RANGE.days} days"
        )
    return HourRange(start.timestamp(), end.timestamp())


def _parse_hour(name: str, text: str | None) -> datetime:
    if text is None:
        raise UnprocessableEntityError(f"{name} is missing; give a full hour with its time zone")
    time = datetime.fromisoformat(text)
    if time.timestamp() % HOUR_SECONDS:
        raise UnprocessableEntityError(f"{name} is {text}; expected a full hour")
    return time


@dataclass(frozen=True, slots=True)
class UsageItem:
    """The usage of one kind in one hour, by one session, of one base model."""

    hour: int
    session_id: str
    base_model: str
    info: BillingEventInfo


def sum_usage(rows: Iterable[UsageRecord]) -> dict[tuple[int, str, str, str], UsageItem]:
    """Sum usage records over the runs of each session."""
    amounts: dict[tuple[int, str, str, str], int] = {}
    for row in rows:
        if row.kind in _EVENT_BUILDERS:
            key = (row.hour, row.session_id, row.base_model, row.kind)
            amounts[key] = amounts.get(key, 0) + row.amount
    return {
        key: UsageItem(key[0], key[1], key[2], _EVENT_BUILDERS[key[3]](amount))
        for key, amount in amounts.items()
    }


def sum_storage(
    stored_checkpoints: Iterable[CheckpointRecord], hours: HourRange, now: float
) -> Iterator[UsageItem]:
    """The storage of checkpoints that still exist, in gigabyte hours."""
    totals: dict[tuple[int, str, str], float] = {}
    for checkpoint in stored_checkpoints:
        expires_at = checkpoint.expires_at
        end = min(hours.end, now, now if expires_at is None else expires_at)
        start = max(hours.start, checkpoint.created_at)
        for hour, share in _hour_shares(start, end):
            key = (hour, checkpoint.session_id, checkpoint.base_model)
            totals[key] = totals.get(key, 0.0) + share * checkpoint.size_bytes / GIGABYTE
    for key, amount in totals.items():
        yield UsageItem(*key, types.StorageBillingEvent(gigabyte_hours=amount))


def _hour_shares(start: float, end: float) -> Iterator[tuple[int, float]]:
    """Yield the hours that overlap a time range, and the fraction of each that does."""
    hour = int(start // HOUR_SECONDS)
    while start < end and hour * HOUR_SECONDS < end:
        begin, stop = hour * HOUR_SECONDS, (hour + 1) * HOUR_SECONDS
        yield hour, (min(stop, end) - max(begin, start)) / HOUR_SECONDS
        hour += 1


def serialize_usage(
    item: UsageItem, tenant_id: str, project_id: str | None
) -> types.BillingUsageEvent:
    """Convert usage to a billing event without a price."""
    return types.BillingUsageEvent(
        bucket_start=to_datetime(item.hour * HOUR_SECONDS),
        bucket_end=to_datetime((item.hour + 1) * HOUR_SECONDS),
        base_model=item.base_model,
        user_id=tenant_id,
        session_id=item.session_id or None,
        project_id=project_id,
        event_info=item.info,
    )


#: Events of the audit log by filter.
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


async def audit_log(services: Services, context: RequestContext[object]) -> types.AuditLogResponse:
    """List the audit log of one day, by default today, oldest first."""
    text = context.query.get("day")
    day = date.fromisoformat(text) if text else datetime.fromtimestamp(clock.now(), UTC).date()
    start = datetime.combine(day, datetime.min.time(), UTC).timestamp()
    events = EVENTS_BY_FILTER.get(context.query.get("event_type", "all"))

    def query(db: Connection) -> list[AuditRecord]:
        return accounting.list_audit(
            db,
            context.tenant_id,
            since=start,
            until=start + DAY_SECONDS,
            events=events,
            limit=MAX_ENTRIES,
        )

    newest_first = await read(services, query)
    return types.AuditLogResponse(
        entries=[_serialize_audit_entry(entry) for entry in reversed(newest_first)]
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
    services: Services, context: RequestContext[object]
) -> types.BillingUsageResponse:
    """Return the caller's hourly usage of tokens and checkpoint storage."""
    hours = parse_hour_range(context.query.get("starting_on"), context.query.get("ending_before"))
    tenant_id = context.tenant_id

    def query(db: Connection) -> types.BillingUsageResponse:
        rows = accounting.list_usage(db, tenant_id, hours.start, hours.end)
        storage = sum_storage(_list_checkpoints(db, tenant_id), hours, clock.now())
        items = sorted(
            (*sum_usage(rows).values(), *storage), key=lambda item: (item.hour, item.session_id)
        )
        known = _find_sessions(db, tenant_id, {item.session_id for item in items})
        events = [
            serialize_usage(item, tenant_id, known[item.session_id].project_id)
            if item.session_id in known
            else serialize_usage(item, tenant_id, None)
            for item in items
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

    return await read(services, query)


def _list_checkpoints(db: Connection, tenant_id: str) -> list[CheckpointRecord]:
    """All existing checkpoints of a tenant."""
    now = clock.now()
    records: list[CheckpointRecord] = []
    while True:
        page, total = checkpoints.list_page(
            db, tenant_id, limit=_PAGE_SIZE, offset=len(records), now=now
        )
        records += page
        if not page or len(records) >= total:
            return records


def _find_sessions(
    db: Connection, tenant_id: str, session_ids: set[str]
) -> dict[str, SessionRecord]:
    records = (sessions.find(db, session_id) for session_id in sorted(session_ids) if session_id)
    return {
        session.id: session
        for session in records
        if session is not None and session.tenant_id == tenant_id
    }


async def storage_usage(
    services: Services, context: RequestContext[object]
) -> types.CurrentCheckpointStorageUsageResponse:
    """Return the current checkpoint storage of the caller, by project."""
    project_id = context.query.get("project_id")
    rows = await read(
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
        for row in rows
    ]
    return types.CurrentCheckpointStorageUsageResponse(data=items)


async def get_quotas(services: Services, context: RequestContext[object]) -> QuotaUsageResponse:
    """Return the quotas of the caller's tenant and their use."""
    uses = await read(
        services, lambda db: services.quotas.list_usage(db, context.tenant_id, clock.now())
    )
    return QuotaUsageResponse(
        quotas=[QuotaUsage(name=use.name, used=use.used, limit=use.limit or None) for use in uses]
    )


ROUTES: dict[str, Handler] = {
    "get_quotas": get_quotas,
    "get_audit_log": audit_log,
    "get_billing_usage": billing_usage,
    "get_current_checkpoint_storage_usage": storage_usage,
}
