"""Output of usage and storage reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tinkex.cli.format import format_count, format_size
from tinkex.cli.output.base import Column, Output

if TYPE_CHECKING:
    from tinkex.types import BillingUsageResponse, CurrentCheckpointStorageUsageResponse
    from tinkex.types.billing import BillingUsageEvent, QuotaUsage

USAGE_FIELDS = (
    "bucket_start",
    "bucket_end",
    "base_model",
    "user_id",
    "user_name",
    "session_id",
    "project_id",
    "estimated_cost_usd",
    "effective_rate_usd_per_million_tokens",
    "effective_rate_usd_per_gigabyte_month",
    "type",
)
SESSION_FIELDS = ("session_id", "user_metadata")
STORAGE_FIELDS = (
    "effective_rate_usd_per_gigabyte_month",
    "project_id",
    "org_user_urn",
    "user_email",
    "user_name",
    "checkpoint_count",
    "size_bytes",
    "size_gigabytes",
    "estimated_monthly_cost_usd",
)
#: Label and amount field of each kind of usage.
_USAGE_KINDS = {
    "training": ("Trained", "token_count"),
    "sampling_prefill": ("Prompt", "token_count"),
    "sampling_sample": ("Sampled", "token_count"),
    "checkpoint": ("Checkpoints", "count"),
    "storage": ("Storage GB h", "gigabyte_hours"),
}
_USAGE_COLUMNS = (
    Column("Hour (UTC)"),
    Column("Use"),
    Column("Amount", is_number=True),
    Column("Base Model", 1),
    Column("Session", 2),
    Column("User", 4),
    Column("Project", 5),
    Column("Cost USD", 3, is_number=True),
)
_STORAGE_COLUMNS = (
    Column("Project"),
    Column("Owner", 1),
    Column("Checkpoints", is_number=True),
    Column("Size", is_number=True),
    Column("USD/month", 2, is_number=True),
)


def flatten_usage(usage: BillingUsageResponse) -> list[dict[str, object]]:
    """Flatten usage events: the fields of `event_info` join the others."""
    rows = [event.model_dump(mode="json") for event in usage.data]
    return [row | row.pop("event_info") for row in rows]


def session_rows(usage: BillingUsageResponse) -> list[dict[str, object]]:
    """Return a row per session, with its metadata as a JSON string."""
    return [
        {
            "session_id": name,
            "user_metadata": session.user_metadata and json.dumps(session.user_metadata),
        }
        for name, session in usage.sessions.items()
    ]


class UsageTable(Output):
    """Usage per hour."""

    def __init__(self, usage: BillingUsageResponse) -> None:
        self._usage = usage

    def to_dict(self) -> dict[str, object]:
        """The official JSON fields."""
        return {
            "data": [event.model_dump() for event in self._usage.data],
            "sessions": {key: row.model_dump() for key, row in self._usage.sessions.items()},
            "cost_data_through": self._usage.cost_data_through,
        }

    def columns(self) -> Sequence[Column]:
        """The most important fields; --csv writes all of them."""
        return _USAGE_COLUMNS

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per event."""
        return [_usage_cells(event) for event in self._usage.data]

    def title(self) -> str:
        """The number of rows."""
        count = len(self._usage.data)
        return (
            f"{format_count(count, 'hourly row')} of usage" if count else "No usage in this period"
        )


def _usage_cells(event: BillingUsageEvent) -> list[str]:
    info = event.event_info.model_dump(mode="json")
    name, field = _USAGE_KINDS.get(info["type"], (info["type"], "amount"))
    amount = info.get(field)
    return [
        event.bucket_start.astimezone(UTC).strftime("%Y-%m-%d %H:00"),
        f"{name} (cached)" if info.get("cached") else name,
        "" if amount is None else _format_amount(amount),
        event.base_model or "",
        event.session_id or "",
        event.user_name or event.user_id or "",
        event.project_id or "",
        format_usd(event.estimated_cost_usd),
    ]


def _format_amount(amount: float) -> str:
    """Format a count, or gigabyte hours with a few digits."""
    if isinstance(amount, int):
        return f"{amount:,}"
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.4g}"


class StorageTable(Output):
    """Checkpoint storage by project and owner."""

    def __init__(self, usage: CurrentCheckpointStorageUsageResponse) -> None:
        self._usage = usage

    def csv_rows(self) -> list[dict[str, object]]:
        """Return a row per item, each with the price."""
        rate = {STORAGE_FIELDS[0]: self._usage.effective_rate_usd_per_gigabyte_month}
        return [rate | item.model_dump() for item in self._usage.data]

    def to_dict(self) -> dict[str, object]:
        """The official JSON fields."""
        return self._usage.model_dump()

    def columns(self) -> Sequence[Column]:
        """The most important fields; --csv writes all of them."""
        return _STORAGE_COLUMNS

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per item."""
        return [
            [
                item.project_id or "",
                item.user_email or item.user_name or item.org_user_urn or "",
                f"{item.checkpoint_count:,}",
                format_size(item.size_bytes),
                format_usd(item.estimated_monthly_cost_usd),
            ]
            for item in self._usage.data
        ]

    def title(self) -> str:
        """The line above the table."""
        return "Current checkpoint storage" if self._usage.data else "No checkpoints are stored"


def format_usd(amount: float | None) -> str:
    """Format an amount in US dollars; N/A if unknown."""
    return "N/A" if amount is None else f"{amount:,.2f}" if amount >= 0.01 else f"{amount:.4g}"


_TOKEN_FIELDS = ("trained_tokens", "prompt_tokens", "cached_prompt_tokens", "sampled_tokens")
_SUMMARY_COLUMNS = (
    Column("Base Model"),
    Column("Trained", is_number=True),
    Column("Prompt", 1, is_number=True),
    Column("Cached", 3, is_number=True),
    Column("Sampled", is_number=True),
    Column("Checkpoints", 2, is_number=True),
    Column("Cost USD", 4, is_number=True),
)


def sum_usage(events: Sequence[BillingUsageEvent]) -> dict[str, float | None]:
    """Sum tokens, checkpoints and cost; the cost is None if all are unknown."""
    sums = dict.fromkeys((*_TOKEN_FIELDS, "checkpoints"), 0)
    costs = [event.estimated_cost_usd for event in events]
    known = [cost for cost in costs if cost is not None]
    for event in events:
        info = event.event_info.model_dump(mode="json")
        name = _amount_field(info["type"], is_cached=bool(info.get("cached")))
        if name is not None:
            sums[name] += info.get("token_count") or info.get("count") or 0
    return {**sums, "estimated_cost_usd": sum(known) if known else None}


def _amount_field(kind: str, *, is_cached: bool) -> str | None:
    if kind == "sampling_prefill":
        return "cached_prompt_tokens" if is_cached else "prompt_tokens"
    kinds = {
        "training": _TOKEN_FIELDS[0],
        "sampling_sample": _TOKEN_FIELDS[3],
        "checkpoint": "checkpoints",
    }
    return kinds.get(kind)


class UsageSummary(Output):
    """Usage per model in a period, and the current storage."""

    def __init__(
        self,
        used: BillingUsageResponse,
        stored: CurrentCheckpointStorageUsageResponse,
        quotas: Sequence[QuotaUsage],
        start: datetime,
        end: datetime,
    ) -> None:
        names = {event.base_model for event in used.data if event.base_model}
        self._models = {
            name: sum_usage([event for event in used.data if event.base_model == name])
            for name in sorted(names)
        }
        self._totals = sum_usage(used.data)
        self._span = (start, end)
        self._quotas = quotas
        costs = [item.estimated_monthly_cost_usd for item in stored.data]
        known = [cost for cost in costs if cost is not None]
        self._num_checkpoints = sum(item.checkpoint_count for item in stored.data)
        self._stored_bytes = sum(item.size_bytes for item in stored.data)
        self._storage_cost = sum(known) if known else None

    def to_dict(self) -> dict[str, object]:
        """Sums per model, totals, storage and quotas."""
        start, end = self._span
        storage = {
            "checkpoint_count": self._num_checkpoints,
            "size_bytes": self._stored_bytes,
            "estimated_monthly_cost_usd": self._storage_cost,
        }
        return {
            "starting_on": start,
            "ending_before": end,
            "models": [{"base_model": name, **sums} for name, sums in self._models.items()],
            "total": self._totals,
            "storage": storage,
            "quotas": {
                quota.name: {"used": quota.used, "limit": quota.limit} for quota in self._quotas
            },
        }

    def columns(self) -> Sequence[Column]:
        """Tokens and costs."""
        return _SUMMARY_COLUMNS

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per model, and a total row for several models."""
        all_row = [("All models", self._totals)] if len(self._models) > 1 else []
        return [
            [
                model,
                *(f"{sums[name]:,}" for name in (*_TOKEN_FIELDS, "checkpoints")),
                format_usd(sums["estimated_cost_usd"]),
            ]
            for model, sums in [*self._models.items(), *all_row]
        ]

    def title(self) -> str:
        """The period, the current storage and the quotas."""
        start, end = self._span
        count = format_count(self._num_checkpoints, "checkpoint")
        stored = f"{count} stored, {format_size(self._stored_bytes)}"
        what = "Tokens" if self._models else "No tokens"
        title = f"{what} from {start:%Y-%m-%d %H:00} to {end:%Y-%m-%d %H:00} UTC; {stored}"
        limited = [quota for quota in self._quotas if quota.limit is not None]
        return "\n".join([title, *map(_quota_line, limited)])


def _quota_line(quota: QuotaUsage) -> str:
    return f"Quota {quota.name}: {quota.used:,} of {quota.limit:,} used"
