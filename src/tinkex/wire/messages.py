"""Messages that are not part of the public API."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from tinkex import types
from tinkex.types.base import Message, Reply


class Empty(Reply):
    """An empty message."""


class CancelFutureRequest(Message):
    """Cancel a job."""

    request_id: str


class FinishSessionRequest(Message):
    """Report how a session ended."""

    reason: types.ClientSessionFinishReason
    detail: str | None = None


class TtlRequest(Message):
    """Set a checkpoint's lifetime; None removes it."""

    ttl_seconds: int | None


class WeightsInfoRequest(Message):
    """Request information about a checkpoint."""

    tinker_path: str


class AliasMessage(Message):
    """A name of a checkpoint."""

    name: str
    tinker_path: str


class AliasReply(Reply):
    """A name of a checkpoint, and what it meant before."""

    name: str
    tinker_path: str
    previous_path: str | None = None


class ListAliasesReply(Reply):
    """The names of the caller's checkpoints."""

    aliases: list[AliasMessage]


class ReportMetricsRequest(Message):
    """Metrics that a client measured for one of its optimizer steps."""

    seq_id: int
    """The sequence number of the optimizer step within its run."""
    metrics: dict[str, float]


class RenameRunRequest(Message):
    """Set the name of a training run; None removes it."""

    name: str | None = None


class SetRunTagsRequest(Message):
    """Replace the tags of a training run."""

    tags: list[str]


class AssignProjectRequest(Message):
    """Move a session to a project."""

    project_id: str


class TraceExportReply(Reply):
    """The state of a trace export."""

    status: str
    url: str | None = None
    error: str | None = None


class ArchiveReply(Reply):
    """The URL of a checkpoint's archive, and when it expires."""

    url: str
    expires: datetime | None = None


class TokenizerReply(Reply):
    """The tokenizer of a base model."""

    base_model: str
    tokenizer_id: str
    """Its name on the hub, or else on the server."""
    digest: str
    """SHA-256 over the names and contents of its files."""
    files: dict[str, bytes] = msgspec.field(default_factory=dict)
    """The files; empty unless the request has the digest."""


class ApiKeyReply(Reply):
    """The owner of an API key."""

    key_id: int
    name: str = ""
    note: str | None = None
    details: dict[str, Any] | None = None
