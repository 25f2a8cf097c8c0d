"""What usage costs: hourly events, and the storage that checkpoints take now."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

import msgspec
from msgspec import field

from tinkex.types.base import Message, Reply
from tinkex.types.open_types import OpenRecord, open_union


class GetBillingUsageRequest(Message):
    """Ask for the usage of a span of at most 14 days; both ends are full hours."""

    starting_on: datetime
    """The first hour."""
    ending_before: datetime
    """The hour after the last."""


class TrainingBillingEvent(Reply, tag="training"):
    """Tokens trained on."""

    type: ClassVar[Literal["training"]] = "training"

    token_count: int


class SamplingPrefillBillingEvent(Reply, tag="sampling_prefill"):
    """Prompt tokens read while sampling."""

    type: ClassVar[Literal["sampling_prefill"]] = "sampling_prefill"

    cached: bool
    """Whether they came from the prefix cache, which costs less."""
    token_count: int


class SamplingSampleBillingEvent(Reply, tag="sampling_sample"):
    """Tokens sampled."""

    type: ClassVar[Literal["sampling_sample"]] = "sampling_sample"

    token_count: int


class CheckpointBillingEvent(Reply, tag="checkpoint"):
    """Checkpoints made."""

    type: ClassVar[Literal["checkpoint"]] = "checkpoint"

    count: int


class StorageBillingEvent(Reply, tag="storage"):
    """Storage used by checkpoints."""

    type: ClassVar[Literal["storage"]] = "storage"

    gigabyte_hours: float


class UnknownBillingEvent(OpenRecord):
    """A kind of usage that this version does not know; every field is kept."""


BillingEventInfo: TypeAlias = (
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent
)


def _read_unknown_event(data: Mapping[str, Any]) -> Any:
    known = [kind.type for kind in get_args(BillingEventInfo)]
    return NotImplemented if data.get("type") in known else UnknownBillingEvent.from_wire(data)


if TYPE_CHECKING:
    _OpenEventInfo: TypeAlias = BillingEventInfo | UnknownBillingEvent
else:
    _OpenEventInfo = open_union("event_info", BillingEventInfo, _read_unknown_event)


class BillingUsageEvent(Reply):
    """One hour of one kind of usage."""

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
    """The session it was; its metadata is in `BillingUsageResponse.sessions`."""
    project_id: str | None = None
    """The project the session belongs to now."""
    estimated_cost_usd: float | None = None
    """The cost before credits; None where it is not known. Not an invoice."""
    effective_rate_usd_per_million_tokens: float | None = None
    """The price of tokens behind the estimate."""
    effective_rate_usd_per_gigabyte_month: float | None = None
    """The price of storage behind the estimate; a month has 720 hours."""
    event_info: _OpenEventInfo
    """The kind of usage and its amount; its `type` tells them apart."""


class BillingUsageSession(Reply):
    """What is known about a session that was used."""

    user_metadata: dict[str, str] | None = None
    """What its owner attached to it."""


class BillingUsageResponse(Reply):
    """The usage that was asked for."""

    data: list[BillingUsageEvent]
    """The events, hour by hour."""
    sessions: dict[str, BillingUsageSession] = msgspec.field(default_factory=dict)
    """Every session in `data`, by its id."""
    cost_data_through: datetime | None = None
    """Estimates before this moment follow invoices, later ones the price list."""


class GetCurrentCheckpointStorageUsageRequest(Message):
    """Ask how much storage checkpoints take now."""

    project_id: str | None = None
    """Only in this project; None is everywhere."""


class QuotaUsage(Reply):
    """A quota of a tenant, and how much of it is used."""

    name: str
    """models, checkpoints, stored_bytes, tokens_per_hour or sessions_per_hour."""
    used: int
    limit: int | None = None
    """None is unlimited."""


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
    """The size in the unit that is billed."""
    estimated_monthly_cost_usd: float | None = None
    """What 720 hours of it cost now."""


class CurrentCheckpointStorageUsageResponse(Reply):
    """How much storage checkpoints take; it may be an hour or two behind."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    """The price of storage."""
    data: list[CurrentCheckpointStorageUsageItem]
    """One item per project and owner."""


class AuthTokenResponse(Reply):
    """A short-lived token for a credential."""

    jwt: str


class WhoamiResponse(Reply):
    """Who the credential belongs to."""

    user_urn: str
    """The caller."""
    org_urn: str
    """The organization the caller acts in."""
    email: str | None = None
    """The caller's address, if the caller is a person."""


class AuditLogEntry(Reply):
    """One thing that was done."""

    timestamp: datetime
    """When."""
    event: str
    """What, as resource_action."""
    event_details: dict[str, Any] = field(default_factory=dict)
    """By whom, to what, and anything else that was noted."""
    model_id: str | None = None
    """Deprecated: see `event_details`."""
    tinker_path: str | None = None
    """Deprecated: see `event_details`."""
    purpose: str | None = None
    """Deprecated: see `event_details`."""


class AuditLogResponse(Reply):
    """What was done, in order."""

    entries: list[AuditLogEntry]
