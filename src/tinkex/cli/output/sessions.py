"""Output of session commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tinkex.cli.format import format_count, format_optional, format_size, format_timestamp
from tinkex.cli.output.base import Column, Output, PropertiesOutput, list_title
from tinkex.cli.output.runs import metadata_rows

#: Labels of sessions finished by their client.
_FINISH_LABELS = {"success": "Finished", "errored": "Errored", "interrupted": "Interrupted"}
_STATE_LABELS = {"active": "Active", "cancelled": "Cancelled", "failed": "Failed"}
SessionRow = Mapping[str, Any]


class SessionColumn(NamedTuple):
    """A column that a list of sessions can show."""

    column: Column
    cell: Callable[[SessionRow], str]
    summary: str


SESSION_COLUMNS = {
    "id": SessionColumn(Column("Session ID"), lambda row: row["session_id"], "id of the session"),
    "name": SessionColumn(
        Column("Name", 2), lambda row: row.get("display_name") or "", "name of the session"
    ),
    "status": SessionColumn(
        Column("Status", 1), lambda row: format_session_state(row), "status of the session"
    ),
    "created": SessionColumn(
        Column("Created", 1), lambda row: format_timestamp(row.get("created_at")), "creation time"
    ),
    "checkpoints": SessionColumn(
        Column("Checkpoints", 3, is_number=True),
        lambda row: format_optional(row.get("checkpoints_count")),
        "number of checkpoints",
    ),
    "storage": SessionColumn(
        Column("Storage", 4, is_number=True),
        lambda row: format_optional(row.get("checkpoint_storage_bytes"), format_size),
        "size of the checkpoints",
    ),
    "project": SessionColumn(
        Column("Project", 5), lambda row: row.get("project_id") or "", "project of the session"
    ),
    "owner": SessionColumn(
        Column("Owner", 6), lambda row: row.get("owner") or "", "owner of the session"
    ),
}
DEFAULT_SESSION_COLUMNS = ("id", "name", "status", "created", "checkpoints", "storage")


def default_session_columns(sessions: Sequence[SessionRow]) -> tuple[str, ...]:
    """Return the default columns that have values for these sessions."""
    is_named = any(session.get("display_name") for session in sessions)
    return tuple(name for name in DEFAULT_SESSION_COLUMNS if is_named or name != "name")


def format_session_state(session: SessionRow) -> str:
    """Format the state of a session."""
    status = session.get("status") or {}
    kind = status.get("type", "")
    if kind == "client_finished":
        return _FINISH_LABELS.get((status.get("reason") or {}).get("type", ""), "Finished")
    return _STATE_LABELS.get(kind, "Unknown")


def session_end_detail(session: SessionRow) -> str | None:
    """Return the message or detail of a session's end."""
    status = session.get("status") or {}
    return status.get("message") or status.get("detail")


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

    def to_dict(self) -> dict[str, Any]:
        """The sessions, and whether there are more."""
        shown = len(self._sessions)
        total = None if self._has_more else shown
        counts = {"total": total, "shown": shown, "has_more": self._has_more}
        return {"sessions": list(self._sessions)} | counts

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
            ("Created", session.get("created_at") and format_timestamp(session["created_at"])),
            ("Owner", session.get("owner")),
            ("Project", session.get("project_id")),
            ("Checkpoints", session.get("checkpoints_count")),
            *_id_rows("Training Run", session["training_run_ids"]),
            *_id_rows("Sampler", session["sampler_ids"]),
            *metadata_rows(session.get("user_metadata")),
        ]
        known = [(name, str(value)) for name, value in rows if value is not None]
        super().__init__(session, known, f"Session: {session['session_id']}")


def _id_rows(noun: str, ids: Sequence[str]) -> list[tuple[str, str]]:
    return [(f"{noun}s", str(len(ids))), *((f"  - {noun}", name) for name in ids)]


class TraceExport(PropertiesOutput):
    """An exported session trace."""

    def __init__(self, session_id: str, **fields: Any) -> None:
        """`fields` contains url, or destination and file_size_bytes."""
        rows = [("Session ID", session_id)]
        if "url" in fields:
            rows.append(("Download URL", fields["url"]))
        if "destination" in fields:
            rows.append(("Saved to", fields["destination"]))
        if "file_size_bytes" in fields:
            rows.append(("Size", format_size(fields["file_size_bytes"])))
        data = {"session_id": session_id} | fields
        super().__init__(data, rows, f"Trace Export: {session_id}")
