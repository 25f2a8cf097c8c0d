"""What was used and what was done: the numbers and entries behind billing and audit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tinkex import clock

#: What can be used up.
TRAINING = "training"
PREFILL = "sampling_prefill"
SAMPLE = "sampling_sample"
CHECKPOINT = "checkpoint"


class Account:
    """What one tenant used of one base model in one session, by the hour."""

    def __init__(self, tenant: str, session_id: str, base_model: str) -> None:
        self.tenant = tenant
        self.session_id = session_id
        self.base_model = base_model
        self._amounts: dict[tuple[int, str], int] = {}

    def count(self, kind: str, amount: int) -> None:
        """Add to what was used."""
        key = (int(clock.now() // 3600), kind)
        self._amounts[key] = self._amounts.get(key, 0) + amount

    def events(self) -> list[dict[str, Any]]:
        """One event per hour and kind."""
        return [self._event(hour, kind, amount) for (hour, kind), amount in self._amounts.items()]

    def _event(self, hour: int, kind: str, amount: int) -> dict[str, Any]:
        start = datetime.fromtimestamp(hour * 3600, UTC)
        name = "count" if kind == CHECKPOINT else "token_count"
        info: dict[str, Any] = {"type": kind, name: amount}
        if kind == PREFILL:
            info["cached"] = False
        return {
            "bucket_start": start,
            "bucket_end": start + timedelta(hours=1),
            "base_model": self.base_model,
            "session_id": self.session_id,
            "project_id": "default",
            "estimated_cost_usd": 0.0,
            "event_info": info,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Something somebody did to a checkpoint or a session."""

    tenant: str
    timestamp: datetime
    event: str
    tinker_path: str | None = None
    model_id: str | None = None


class Ledger:
    """All accounts, and the audit log."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, str, str], Account] = {}
        self.entries: list[AuditEntry] = []

    def account(self, tenant: str, session_id: str, base_model: str) -> Account:
        """The account for this use; keep it, to count without looking it up."""
        key = (tenant, session_id, base_model)
        if key not in self._accounts:
            self._accounts[key] = Account(*key)
        return self._accounts[key]

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
                timestamp=clock.utc_now(),
                event=event,
                tinker_path=tinker_path,
                model_id=model_id,
            )
        )

    def usage(self, tenant: str, start: datetime, end: datetime) -> list[dict[str, Any]]:
        """The tenant's usage events of the hours from start to end, oldest first."""
        events = [
            event
            for account in self._accounts.values()
            if account.tenant == tenant
            for event in account.events()
            if start <= event["bucket_start"] < end
        ]
        return sorted(events, key=lambda event: event["bucket_start"])
