"""What was used and what was done: the numbers and entries behind billing and audit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

#: What can be used up.
TRAINING = "training"
PREFILL = "sampling_prefill"
SAMPLE = "sampling_sample"
CHECKPOINT = "checkpoint"


class _Bucket(NamedTuple):
    hour: int
    tenant: str
    session_id: str
    base_model: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Something somebody did to a checkpoint or a session."""

    tenant: str
    timestamp: datetime
    event: str
    tinker_path: str | None = None
    model_id: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


class Ledger:
    """Counts tokens per hour, session and model, and keeps the audit log."""

    def __init__(self) -> None:
        self._counts: Counter[_Bucket] = Counter()
        self.entries: list[AuditEntry] = []

    def count(
        self, now: float, tenant: str, session_id: str, base_model: str, kind: str, amount: int
    ) -> None:
        """Add to what was used."""
        self._counts[_Bucket(int(now // 3600), tenant, session_id, base_model, kind)] += amount

    def note(
        self,
        tenant: str,
        event: str,
        *,
        tinker_path: str | None = None,
        model_id: str | None = None,
    ) -> None:
        """Add an entry to the audit log."""
        self.entries.append(
            AuditEntry(
                tenant=tenant,
                timestamp=datetime.now(UTC),
                event=event,
                tinker_path=tinker_path,
                model_id=model_id,
            )
        )

    def usage(self, tenant: str, start: datetime, end: datetime) -> list[dict[str, Any]]:
        """The tenant's usage events of the hours from start to end."""
        events = []
        for bucket, amount in sorted(self._counts.items()):
            bucket_start = datetime.fromtimestamp(bucket.hour * 3600, UTC)
            if bucket.tenant == tenant and start <= bucket_start < end:
                events.append(_event(bucket, bucket_start, amount))
        return events


def _event(bucket: _Bucket, start: datetime, amount: int) -> dict[str, Any]:
    name = "count" if bucket.kind == CHECKPOINT else "token_count"
    info: dict[str, Any] = {"type": bucket.kind, name: amount}
    if bucket.kind == PREFILL:
        info["cached"] = False
    return {
        "bucket_start": start,
        "bucket_end": start + timedelta(hours=1),
        "base_model": bucket.base_model,
        "session_id": bucket.session_id,
        "project_id": "default",
        "estimated_cost_usd": 0.0,
        "event_info": info,
    }
