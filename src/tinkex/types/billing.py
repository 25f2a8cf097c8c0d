"""Billing usage, quotas, storage, authentication and audit messages."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

import msgspec
from msgspec import field

from tinkex.types.base import Message, Reply
from tinkex.types.open_types import OpenRecord, open_union


class GetBillingUsageRequest(Message):
    """Request the usage of at most 14 days; both ends are full hours."""

    starting_on: datetime
    """The first hour."""
    ending_before: datetime
    """The end, exclusive."""


class TrainingBillingEvent(Reply, tag="training"):
    """Tokens trained on."""

    type: ClassVar[Literal["training"]] = "training"

    token_count: int


class SamplingPrefillBillingEvent(Reply, tag="sampling_prefill"):
    """Prompt tokens prefilled while sampling."""

    type: ClassVar[Literal["sampling_prefill"]] = "sampling_prefill"

    cached: bool
    """Whether they came from the prefix cache, which costs less."""
    token_count: int


class SamplingSampleBillingEvent(Reply, tag="sampling_sample"):
    """Tokens sampled."""

    type: ClassVar[Literal["sampling_sample"]] = "sampling_sample"

    token_count: int


class CheckpointBillingEvent(Reply, tag="checkpoint"):
    """Saved checkpoints."""

    type: ClassVar[Literal["checkpoint"]] = "checkpoint"

    count: int


class StorageBillingEvent(Reply, tag="storage"):
    """Storage used by checkpoints."""

    type: ClassVar[Literal["storage"]] = "storage"

    gigabyte_hours: float


class UnknownBillingEvent(OpenRecord):
    """A kind of usage unknown to this version; all fields are preserved."""


BillingEventInfo: TypeAlias = (
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent
)


def _read_unknown_event(data: Mapping[str, object]) -> object:
    known = [kind.type for kind in get_args(BillingEventInfo)]
    return NotImplemented if data.get("type") in known else UnknownBillingEvent.from_wire(data)


if TYPE_CHECKING:
    _OpenEventInfo: TypeAlias = BillingEventInfo | UnknownBillingEvent
else:
    _OpenEventInfo = open_union("event_info", BillingEventInfo, _read_unknown_event)


class BillingUsageEvent(Reply):
    """The usage of one kind in one hour."""

    bucket_start: datetime
    """The hour's beginning."""
    bucket_end: datetime
    """The hour's end."""
    base_model: str | None = None
    """The base model used."""
    user_id: str | None = None
    """The user whose session it was."""
    user_name: str | None = None
    """That user's name."""
    session_id: str | None = None
    """The session; its metadata is in `BillingUsageResponse.sessions`."""
    project_id: str | None = None
    """The project the session belongs to now."""
    estimated_cost_usd: float | None = None
    """The cost before credits; None if unknown. Not an invoice."""
    effective_rate_usd_per_million_tokens: float | None = None
    """The price of tokens used for the estimate."""
    effective_rate_usd_per_gigabyte_month: float | None = None
    """The price of storage used for the estimate; a month has 720 hours."""
    event_info: _OpenEventInfo
    """The kind of usage (`type`) and its amount."""


class BillingUsageSession(Reply):
    """Information about a session with usage."""

    user_metadata: dict[str, str] | None = None
    """Metadata set by its owner."""


class BillingUsageResponse(Reply):
    """The requested usage."""

    data: list[BillingUsageEvent]
    """The events, hour by hour."""
    sessions: dict[str, BillingUsageSession] = msgspec.field(default_factory=dict)
    """Every session in `data`, by its id."""
    cost_data_through: datetime | None = None
    """Estimates before this time are based on invoices, later ones on the price list."""


class GetCurrentCheckpointStorageUsageRequest(Message):
    """Request the current storage of checkpoints."""

    project_id: str | None = None
    """Only this project; None means all."""


class QuotaUsage(Reply):
    """A quota of a tenant and its usage."""

    name: str
    """models, checkpoints, stored_bytes, tokens_per_hour or sessions_per_hour."""
    used: int
    limit: int | None = None
    """None means unlimited."""


class QuotaUsageResponse(Reply):
    """The quotas of the caller's tenant."""

    quotas: list[QuotaUsage]


class CurrentCheckpointStorageUsageItem(Reply):
    """The checkpoints of one owner in one project."""

    project_id: str | None = None
    org_user_urn: str | None = None
    """The owner."""
    user_email: str | None = None
    """The owner's address."""
    user_name: str | None = None
    """The owner's name."""
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    """The size in the billed unit."""
    estimated_monthly_cost_usd: float | None = None
    """The current cost of 720 hours."""


class CurrentCheckpointStorageUsageResponse(Reply):
    """The storage of checkpoints; may lag by an hour or two."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    """The price of storage."""
    data: list[CurrentCheckpointStorageUsageItem]
    """One item per project and owner."""


class AuthTokenResponse(Reply):
    """A short-lived token for a credential."""

    jwt: str


class WhoamiResponse(Reply):
    """The owner of a credential."""

    user_urn: str
    """The caller."""
    org_urn: str
    """The organization the caller acts in."""
    email: str | None = None
    """The caller's email address, if the caller is a person."""


class AuditLogEntry(Reply):
    """An audit event."""

    timestamp: datetime
    """When it happened."""
    event: str
    """The event, as resource_action."""
    event_details: dict[str, Any] = field(default_factory=dict)
    """Actor, object and other details."""
    model_id: str | None = None
    """Deprecated: see `event_details`."""
    tinker_path: str | None = None
    """Deprecated: see `event_details`."""
    purpose: str | None = None
    """Deprecated: see `event_details`."""


class AuditLogResponse(Reply):
    """Audit events in order."""

    entries: list[AuditLogEntry]
