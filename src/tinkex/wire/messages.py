"""Messages that cross the wire but that no user ever touches."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from tinkex import types
from tinkex.types.base import Message, Reply


class Empty(Reply):
    """Nothing to say."""


class CancelFutureRequest(Message):
    """Stop working on a promise."""

    request_id: str


class FinishSessionRequest(Message):
    """Say how a session ended."""

    reason: types.ClientSessionFinishReason
    detail: str | None = None


class TtlRequest(Message):
    """Set, or with None remove, a checkpoint's lifetime."""

    ttl_seconds: int | None


class WeightsInfoRequest(Message):
    """Ask what a checkpoint holds."""

    tinker_path: str


class ReportMetricsRequest(Message):
    """Metrics that a client measured for one of its optimizer steps."""

    seq_id: int
    """The number of the optimizer step among the operations of its run."""
    metrics: dict[str, float]


class RenameRunRequest(Message):
    """Give a training run a name, or with None take it away."""

    name: str | None = None


class AssignProjectRequest(Message):
    """Move a session to a project."""

    project_id: str


class TraceExportReply(Reply):
    """How far a trace export is."""

    status: str
    url: str | None = None
    error: str | None = None


class ArchiveReply(Reply):
    """Where a checkpoint's archive can be fetched, until when."""

    url: str
    expires: datetime | None = None


class TokenizerReply(Reply):
    """The tokenizer of a base model."""

    base_model: str
    tokenizer_id: str
    """What the hub, or else the server, calls it."""
    digest: str
    """SHA-256 over the names and contents of its files."""
    files: dict[str, bytes] = msgspec.field(default_factory=dict)
    """The files; empty unless the request named the digest."""


class ApiKeyReply(Reply):
    """Who a key belongs to."""

    key_id: int
    name: str = ""
    note: str | None = None
    details: dict[str, Any] | None = None
