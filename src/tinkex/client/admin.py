"""The admin client: audit log, usage, storage and quotas of an organisation."""

from __future__ import annotations

from datetime import date, datetime
from typing import Literal

from tinkex import types
from tinkex.client.compat import deprecate_async_names
from tinkex.client.future import APIFuture
from tinkex.client.rest_base import SessionlessClient
from tinkex.errors import InvalidInput
from tinkex.types.billing import QuotaUsageResponse
from tinkex.wire import endpoints as api

AuditEvent = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@deprecate_async_names
class AdminClient(SessionlessClient):
    """Reads organisation-wide data; requires admin rights."""

    def get_audit_log(
        self, event_type: AuditEvent = "all", day: date | None = None
    ) -> APIFuture[types.AuditLogResponse]:
        """List the events of one day (default: today)."""
        iso_day = day.isoformat() if day is not None else None
        return self._call(api.AUDIT_LOG, query={"event_type": event_type, "day": iso_day})

    async def get_audit_log_async(
        self, event_type: AuditEvent = "all", day: date | None = None
    ) -> types.AuditLogResponse:
        """Async version of get_audit_log()."""
        return await self.get_audit_log(event_type, day)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[types.BillingUsageResponse]:
        """Return the usage between two full hours, at most 14 days apart."""
        return self._call(
            api.BILLING_USAGE,
            query={
                "starting_on": _format_full_hour("starting_on", starting_on),
                "ending_before": _format_full_hour("ending_before", ending_before),
            },
        )

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> types.BillingUsageResponse:
        """Async version of get_billing_usage()."""
        return await self.get_billing_usage(starting_on, ending_before)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[types.CurrentCheckpointStorageUsageResponse]:
        """Return the current size of the stored checkpoints."""
        return self._call(api.STORAGE_USAGE, query={"project_id": project_id})

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> types.CurrentCheckpointStorageUsageResponse:
        """Async version of get_current_checkpoint_storage_usage()."""
        return await self.get_current_checkpoint_storage_usage(project_id)

    def get_quotas(self) -> APIFuture[QuotaUsageResponse]:
        """Return the quotas and usage of the caller's tenant. tinkex servers only."""
        return self._call(api.QUOTAS)

    async def get_quotas_async(self) -> QuotaUsageResponse:
        """Async version of get_quotas()."""
        return await self.get_quotas()


def _format_full_hour(name: str, when: datetime | str) -> str:
    """Format an RFC 3339 time with a zone, on the full hour."""
    try:
        parsed = datetime.fromisoformat(when) if isinstance(when, str) else when
    except ValueError as error:
        raise InvalidInput(f"{name} must be a date and time, got {when!r}") from error
    if parsed.tzinfo is None:
        raise InvalidInput(f"{name} needs a time zone, e.g. 2026-01-31T00:00:00Z, got {when!s}")
    if parsed.minute or parsed.second or parsed.microsecond:
        raise InvalidInput(f"{name} must be a full hour, got {when!s}")
    return parsed.isoformat()
