"""Whose a key is, as far as a server says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.wire.messages import ApiKeyReply


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOwner:
    """A key and who has it."""

    key_id: int | None = None
    key_name: str | None = None
    email: str | None = None
    organization: str | None = None

    @property
    def description(self) -> str:
        """The owner in a few words; empty if nothing is known."""
        who = self.email or self.organization or ""
        if self.email and self.organization:
            who = f"{self.email} ({self.organization})"
        key = f"key {self.key_name!r}" if self.key_name else ""
        return ", ".join(part for part in (who, key) if part)

    def to_dict(self) -> dict[str, Any]:
        """What is known, and null for the rest."""
        return {
            "key_id": self.key_id,
            "key_name": self.key_name,
            "email": self.email,
            "organization": self.organization,
        }


def parse_key_owner(reply: ApiKeyReply | None) -> KeyOwner:
    """The owner of a server's answer; servers differ in how much of it they fill in."""
    if reply is None:
        return KeyOwner()
    details = reply.details or {}
    return KeyOwner(
        key_id=reply.key_id,
        key_name=reply.name or None,
        email=_nested_text(details, "user_details", "email"),
        organization=_nested_text(details, "org_details", "name"),
    )


def _nested_text(details: dict[str, Any], group: str, name: str) -> str | None:
    found = details.get(group)
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, str) and value else None
