"""Telemetry events that a client sends if its user allows it."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Literal, TypeAlias

from msgspec import field

from tinkex.types.base import Message, Reply

EventType: TypeAlias = Literal[
    "SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"
]
Severity: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class SessionStartEvent(Reply, tag_field="event", tag="SESSION_START"):
    """A session started."""

    event: ClassVar[Literal["SESSION_START"]] = "SESSION_START"

    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime


class SessionEndEvent(Reply, tag_field="event", tag="SESSION_END"):
    """A session ended."""

    event: ClassVar[Literal["SESSION_END"]] = "SESSION_END"

    duration: str
    """An ISO 8601 duration."""
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime


class UnhandledExceptionEvent(Reply, tag_field="event", tag="UNHANDLED_EXCEPTION"):
    """An unhandled exception."""

    event: ClassVar[Literal["UNHANDLED_EXCEPTION"]] = "UNHANDLED_EXCEPTION"

    error_message: str
    error_type: str
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime
    traceback: str | None = None


class GenericEvent(Reply, tag_field="event", tag="GENERIC_EVENT"):
    """An event of another kind."""

    event: ClassVar[Literal["GENERIC_EVENT"]] = "GENERIC_EVENT"

    event_id: str
    event_name: str
    event_session_index: int
    severity: Severity
    timestamp: datetime
    event_data: dict[str, Any] = field(default_factory=dict)


TelemetryEvent: TypeAlias = (
    SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent
)


class TelemetryBatch(Reply):
    """Events of one session of one process."""

    events: list[TelemetryEvent]
    platform: str
    """The operating system."""
    sdk_version: str
    session_id: str
    process_uuid: str
    """Identifies the process across sessions."""


class TelemetrySendRequest(Message):
    """Report events of one session of one process."""

    events: list[TelemetryEvent]
    platform: str
    """The operating system."""
    sdk_version: str
    session_id: str
    process_uuid: str
    """Identifies the process across sessions."""


class TelemetryResponse(Reply):
    """The events were received."""

    status: Literal["accepted"]
