"""What was used, hour by hour, as events in the words of the API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from tinkex import types
from tinkex.errors import UnprocessableEntityError
from tinkex.server.describe import to_datetime
from tinkex.store.records import CheckpointRecord, UsageRecord

HOUR_SECONDS = 3600
MAX_RANGE = timedelta(days=14)
GIGABYTE = 10**9

_EVENT_BUILDERS: Mapping[str, Callable[[int], Any]] = {
    "training": lambda amount: types.TrainingBillingEvent(token_count=amount),
    "prefill": lambda amount: types.SamplingPrefillBillingEvent(cached=False, token_count=amount),
    "prefill_cached": lambda amount: types.SamplingPrefillBillingEvent(
        cached=True, token_count=amount
    ),
    "sample": lambda amount: types.SamplingSampleBillingEvent(token_count=amount),
    "checkpoint": lambda amount: types.CheckpointBillingEvent(count=amount),
}


class HourRange(NamedTuple):
    """From one full hour to another, in seconds since 1970."""

    start: float
    end: float


def parse_hour_range(starting_on: str | None, ending_before: str | None) -> HourRange:
    """The span that a request asks for: full hours, at most 14 days."""
    start, end = (
        _parse_hour("starting_on", starting_on),
        _parse_hour("ending_before", ending_before),
    )
    if not timedelta(0) < end - start <= MAX_RANGE:
        raise UnprocessableEntityError(
            f"{starting_on} to {ending_before} is no span of up to {MAX_RANGE.days} days"
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
    """Something that was used in one hour, by one session, of one base model."""

    hour: int
    session_id: str
    base_model: str
    info: Any


def sum_usage(rows: Iterable[UsageRecord]) -> dict[tuple[int, str, str, str], UsageItem]:
    """What was counted, with the runs of a session added up."""
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
    """What checkpoints took that are still there, in gigabyte hours."""
    totals: dict[tuple[int, str, str], float] = {}
    for checkpoint in stored_checkpoints:
        end = checkpoint.expires_at
        until = min(hours.end, now, now if end is None else end)
        start = max(hours.start, checkpoint.created_at)
        for hour, share in _hour_shares(start, until):
            key = (hour, checkpoint.session_id, checkpoint.base_model)
            totals[key] = totals.get(key, 0.0) + share * checkpoint.size_bytes / GIGABYTE
    for key, amount in totals.items():
        yield UsageItem(*key, types.StorageBillingEvent(gigabyte_hours=amount))


def _hour_shares(start: float, end: float) -> Iterator[tuple[int, float]]:
    """The hours between two moments, and how much of each lies between them."""
    hour = int(start // HOUR_SECONDS)
    while start < end and hour * HOUR_SECONDS < end:
        begin, stop = hour * HOUR_SECONDS, (hour + 1) * HOUR_SECONDS
        yield hour, (min(stop, end) - max(begin, start)) / HOUR_SECONDS
        hour += 1


def serialize_usage(
    item: UsageItem, tenant_id: str, project_id: str | None
) -> types.BillingUsageEvent:
    """One event; nothing costs anything here, so no price is named."""
    return types.BillingUsageEvent(
        bucket_start=to_datetime(item.hour * HOUR_SECONDS),
        bucket_end=to_datetime((item.hour + 1) * HOUR_SECONDS),
        base_model=item.base_model,
        user_id=tenant_id,
        session_id=item.session_id or None,
        project_id=project_id,
        event_info=item.info,
    )
