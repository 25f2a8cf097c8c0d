"""Output of session commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from tinkex.cli.format import format_count, format_optional, format_size, format_timestamp
from tinkex.cli.output.base import Column, Output, PropertiesOutput, list_title
from tinkex.cli.output.runs import metadata_rows

#: Labels of sessions finished by their client.
_FINISH_LABELS = {"success": "Finished", "errored": "Errored", "interrupted": "Interrupted"}
_STATE_LABELS = {"active": "Active", "cancelled": "Cancelled", "failed": "Failed"}
SessionRow = Mapping[str, object]


class SessionColumn(NamedTuple):
    """A column that a list of sessions can show."""

    column: Column
    cell: Callable[[SessionRow], str]
    summary: str


SESSION_COLUMNS = {
    "id": SessionColumn(
        Column("Session ID"), lambda row: _get_text(row, "session_id"), "id of the session"
    ),
    "name": SessionColumn(
        Column("Name", 2), lambda row: _get_text(row, "display_name"), "name of the session"
    ),
    "status": SessionColumn(
        Column("Status", 1), lambda row: format_session_state(row), "status of the session"
    ),
    "created": SessionColumn(
        Column("Created", 1), lambda row: _format_created(row), "creation time"
    ),
    "checkpoints": SessionColumn(
        Column("Checkpoints", 3, is_number=True),
        lambda row: format_optional(row.get("checkpoints_count")),
        "number of checkpoints",
    ),
    "storage": SessionColumn(
        Column("Storage", 4, is_number=True),
        lambda row: _format_storage(row),
        "size of the checkpoints",
    ),
    "project": SessionColumn(
        Column("Project", 5), lambda row: _get_text(row, "project_id"), "project of the session"
    ),
    "owner": SessionColumn(
        Column("Owner", 6), lambda row: _get_text(row, "owner"), "owner of the session"
    ),
}
DEFAULT_SESSION_COLUMNS = ("id", "name", "status", "created", "checkpoints", "storage")


def default_session_columns(sessions: Sequence[SessionRow]) -> tuple[str, ...]:
    """Return the default columns that have values for these sessions."""
    is_named = any(session.get("display_name") for session in sessions)
    return tuple(name for name in DEFAULT_SESSION_COLUMNS if is_named or name != "name")


def format_session_state(session: SessionRow) -> str:
    """Format the state of a session."""
    status = _get_object(session, "status")
    kind = _get_text(status, "type")
    if kind == "client_finished":
        reason = _get_text(_get_object(status, "reason"), "type")
        return _FINISH_LABELS.get(reason, "Finished")
    return _STATE_LABELS.get(kind, "Unknown")


def session_end_detail(session: SessionRow) -> str | None:
    """Return the message or detail of a session's end."""
    status = _get_object(session, "status")
    return _get_text(status, "message") or _get_text(status, "detail") or None


def _get_text(row: SessionRow, name: str) -> str:
    """Return a field as text; empty if unknown."""
    return str(row.get(name) or "")


def _get_object(row: SessionRow, name: str) -> SessionRow:
    """Return a nested object; empty if unknown."""
    value = row.get(name)
    return value if isinstance(value, Mapping) else {}


def _format_created(row: SessionRow) -> str:
    when = row.get("created_at")
    return format_timestamp(when if isinstance(when, datetime | str) else None)


def _format_storage(row: SessionRow) -> str:
    num_bytes = row.get("checkpoint_storage_bytes")
    return format_size(num_bytes if isinstance(num_bytes, int | float) else None)


class SessionList(Output):
    """A list of sessions; servers do not report the total number."""

    def __init__(
        self, sessions: Sequence[SessionRow], has_more: bool, columns: Sequence[str] | None = None
    ) -> None:
        """Columns chosen by name are always shown, even on a narrow screen."""
        self._sessions = sessions
        self._has_more = has_more
        self._names = tuple(columns or default_session_columns(sessions))
        self._is_chosen = columns is not None

    def to_dict(self) -> dict[str, object]:
        """The sessions, and whether there are more."""
        shown = len(self._sessions)
        return {
            "sessions": list(self._sessions),
            "total": None if self._has_more else shown,
            "shown": shown,
            "has_more": self._has_more,
        }

    def columns(self) -> Sequence[Column]:
        """The chosen columns."""
        chosen = [SESSION_COLUMNS[name].column for name in self._names]
        return [column._replace(rank=0) for column in chosen] if self._is_chosen else chosen

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per session."""
        return [[SESSION_COLUMNS[name].cell(row) for name in self._names] for row in self._sessions]

    def title(self) -> str:
        """The number of shown sessions, and whether there are more."""
        if self._has_more and self._sessions:
            shown = format_count(len(self._sessions), "session")
            return f"{shown} (more not shown, use --limit to see more)"
        return list_title(len(self._sessions), 0, "session")


class SessionInfo(PropertiesOutput):
    """One session with its runs and samplers."""

    def __init__(self, session: SessionRow) -> None:
        rows = [
            ("Session ID", session["session_id"]),
            ("Name", session.get("display_name")),
            ("Status", format_session_state(session)),
            ("  - Detail", session_end_detail(session)),
            ("Created", _format_created(session) if session.get("created_at") else None),
            ("Owner", session.get("owner")),
            ("Project", session.get("project_id")),
            ("Checkpoints", session.get("checkpoints_count")),
            *_id_rows("Training Run", session["training_run_ids"]),
            *_id_rows("Sampler", session["sampler_ids"]),
            *metadata_rows(_get_object(session, "user_metadata")),
        ]
        known = [(name, str(value)) for name, value in rows if value is not None]
        super().__init__(session, known, f"Session: {session['session_id']}")


def _id_rows(noun: str, ids: object) -> list[tuple[str, str]]:
    assert isinstance(ids, list)  # a list of ids in every version of the response
    return [(f"{noun}s", str(len(ids))), *((f"  - {noun}", name) for name in ids)]


class TraceExport(PropertiesOutput):
    """An exported session trace."""

    def __init__(
        self,
        session_id: str,
        *,
        url: str | None = None,
        destination: str | None = None,
        file_size_bytes: int | None = None,
    ) -> None:
        """Give `url`, or `destination` and `file_size_bytes`."""
        fields = {"url": url, "destination": destination, "file_size_bytes": file_size_bytes}
        known = {name: value for name, value in fields.items() if value is not None}
        rows = [
            ("Session ID", session_id),
            *([("Download URL", url)] if url is not None else []),
            *([("Saved to", destination)] if destination is not None else []),
            *([("Size", format_size(file_size_bytes))] if file_size_bytes is not None else []),
        ]
        super().__init__({"session_id": session_id, **known}, rows, f"Trace Export: {session_id}")
