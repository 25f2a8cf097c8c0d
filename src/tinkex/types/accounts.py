"""Who is asking, and what was done in the organization."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from msgspec import field

from tinkex.types.base import Reply


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
