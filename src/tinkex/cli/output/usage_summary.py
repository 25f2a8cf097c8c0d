"""The usage of some days on one screen: a line per model, and what storage takes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tinkex.cli.format import format_count, format_size
from tinkex.cli.output.base import Column, Output
from tinkex.cli.output.usage import flatten_usage, format_usd

if TYPE_CHECKING:
    from tinkex.types import BillingUsageResponse, CurrentCheckpointStorageUsageResponse
    from tinkex.types.billing import QuotaUsage

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


def sum_usage(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens, checkpoints and cost of flat rows; the cost is not known if none of theirs is."""
    found: dict[str, Any] = dict.fromkeys((*_TOKEN_FIELDS, "checkpoints"), 0)
    costs = [row["estimated_cost_usd"] for row in rows if row["estimated_cost_usd"] is not None]
    for row in rows:
        name = _amount_field(row)
        if name is not None:
            found[name] += row.get("token_count") or row.get("count") or 0
    return found | {"estimated_cost_usd": sum(costs) if costs else None}


def _amount_field(row: dict[str, Any]) -> str | None:
    if row["type"] == "sampling_prefill":
        return "cached_prompt_tokens" if row.get("cached") else "prompt_tokens"
    kinds = {
        "training": _TOKEN_FIELDS[0],
        "sampling_sample": _TOKEN_FIELDS[3],
        "checkpoint": "checkpoints",
    }
    return kinds.get(row["type"])


class UsageSummary(Output):
    """What was used between two hours, model by model, and what is stored now."""

    def __init__(
        self,
        used: BillingUsageResponse,
        stored: CurrentCheckpointStorageUsageResponse,
        quotas: Sequence[QuotaUsage],
        start: datetime,
        end: datetime,
    ) -> None:
        rows = flatten_usage(used)
        names = dict.fromkeys(row["base_model"] for row in rows if row["base_model"])
        self._models = [
            {"base_model": name} | sum_usage([row for row in rows if row["base_model"] == name])
            for name in sorted(names)
        ]
        self._totals = sum_usage(rows)
        self._span = (start, end)
        self._quotas = quotas
        costs = [item.estimated_monthly_cost_usd for item in stored.data]
        known = [cost for cost in costs if cost is not None]
        self._stored: dict[str, Any] = {
            "checkpoint_count": sum(item.checkpoint_count for item in stored.data),
            "size_bytes": sum(item.size_bytes for item in stored.data),
            "estimated_monthly_cost_usd": sum(known) if known else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Sums by model, all sums, and storage."""
        start, end = self._span
        span = {"starting_on": start, "ending_before": end}
        quotas = {quota.name: {"used": quota.used, "limit": quota.limit} for quota in self._quotas}
        sums = {"models": self._models, "total": self._totals, "storage": self._stored}
        return span | sums | {"quotas": quotas}

    def columns(self) -> Sequence[Column]:
        """Tokens and costs."""
        return _SUMMARY_COLUMNS

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per model, and one of all if there are more."""
        all_row = [{"base_model": "All models"} | self._totals] if len(self._models) > 1 else []
        return [
            [
                row["base_model"],
                *(f"{row[name]:,}" for name in (*_TOKEN_FIELDS, "checkpoints")),
                format_usd(row["estimated_cost_usd"]),
            ]
            for row in [*self._models, *all_row]
        ]

    def title(self) -> str:
        """The span, and what is stored now."""
        start, end = self._span
        count, size = self._stored["checkpoint_count"], self._stored["size_bytes"]
        stored = f"{format_count(count, 'checkpoint')} stored, {format_size(size)}"
        what = "Tokens" if self._models else "No tokens"
        title = f"{what} from {start:%Y-%m-%d %H:00} to {end:%Y-%m-%d %H:00} UTC; {stored}"
        limited = [quota for quota in self._quotas if quota.limit is not None]
        return "\n".join([title, *map(_quota_line, limited)])


def _quota_line(quota: QuotaUsage) -> str:
    return f"Quota {quota.name}: {quota.used:,} of {quota.limit:,} used"
