"""Rows as they leave the store: frozen, one class per table, fields named like the columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

import sqlalchemy as sa

from tinkex.ids import TinkerPath


class JobState(StrEnum):
    """Where a promise is in its life."""

    QUEUED = "queued"  #: stored; nobody has taken it
    RUNNING = "running"  #: the worker has it
    DONE = "done"  #: the result is stored; final
    FAILED = "failed"  #: it failed or was cancelled, and the reason is stored; final


class RunState(StrEnum):
    """Where a model is in its life."""

    CREATING = "creating"  #: promised
    READY = "ready"  #: it can be trained
    FAILED = "failed"  #: it could not be made
    UNLOADED = "unloaded"  #: its client said that it is done with it
    CORRUPTED = "corrupted"  #: its state on disk is damaged; only its checkpoints are left


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What all rows have in common."""

    @classmethod
    def from_row(cls, row: sa.Row[Any]) -> Self:
        """The record of a row that holds its columns and no others."""
        return cls(**row._mapping)

    def to_columns(self) -> dict[str, Any]:
        """Its columns, to be stored."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord(Record):
    """Whose things are whose."""

    id: str
    name: str
    created_at: float
    quotas: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeyRecord(Record):
    """A key, without the key."""

    id: int
    tenant_id: str
    name: str
    note: str | None
    hint: str
    digest: str
    created_at: float
    revoked_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord(Record):
    """A client's session."""

    id: str
    tenant_id: str
    project_id: str
    display_name: str | None
    tags: list[str]
    user_metadata: Mapping[str, Any]
    sdk_version: str
    created_at: float
    seen_at: float
    finished_at: float | None = None
    finish_reason: str | None = None
    finish_detail: str | None = None
    expired_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Record):
    """A model in training."""

    id: str
    tenant_id: str
    session_id: str
    base_model: str
    spec: Mapping[str, Any]
    user_metadata: Mapping[str, Any] | None
    state: str
    created_at: float
    used_at: float
    next_seq: int = 0
    applied: int = 0
    snapshot_applied: int = 0
    snapshot: str | None = None
    forgotten_seq: int = -1
    num_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRecord(Record):
    """A sampling session."""

    id: str
    tenant_id: str
    session_id: str
    base_model: str
    model_path: str | None
    checkpoint_id: str | None
    num_clones: int = 0
    created_at: float
    used_at: float = 0.0
    """When a sample was last requested; 0 if none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord(Record):
    """Saved weights."""

    id: str
    tenant_id: str
    session_id: str
    project_id: str
    run_id: str
    segment: str
    name: str
    base_model: str
    spec: Mapping[str, Any]
    size_bytes: int
    is_public: bool = False
    is_ephemeral: bool = False
    user_metadata: Mapping[str, Any] | None = None
    created_at: float
    expires_at: float | None = None
    deleted_at: float | None = None

    @property
    def path(self) -> TinkerPath:
        """Its address."""
        return TinkerPath(self.run_id, self.segment, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A promise to be made."""

    id: str
    tenant_id: str
    session_id: str
    kind: str
    key: str | None
    """What makes a repeated request the same request."""
    run_id: str | None = None
    sampler_id: str | None = None
    position: int | None = None
    """The place within the run; None is after everything that is known."""
    payload: bytes
    is_proto: bool = False
    num_sequences: int = 0
    num_tokens: int = 0
    """The tokens of a pass, or the most that a sample reads and writes."""
    base_model: str | None = None
    """The base model of a sample that has no sampling session."""
    is_cancelled: bool = False
    """Whether the job only takes up its number, and does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(Record):
    """A promise, without its payload and its result."""

    no: int
    id: str
    tenant_id: str
    session_id: str
    kind: str
    run_id: str | None
    sampler_id: str | None
    position: int
    state: str
    attempts: int
    payload_bytes: int
    is_proto: bool
    result_bytes: int
    error: str | None
    category: str | None
    applied: int | None
    num_sequences: int
    created_at: float
    started_at: float | None
    finished_at: float | None
    fetched_at: float | None
    num_tokens: int = 0
    base_model: str | None = None
    cancelled_at: float | None = None
    """When the cancellation of a pass was requested; the worker ends it."""

    @property
    def is_finished(self) -> bool:
        """Whether the outcome is known."""
        return self.state in {JobState.DONE, JobState.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(Record):
    """What was done when."""

    session_id: str
    run_id: str | None
    sampler_id: str | None
    kind: str
    job_id: str
    num_tokens: int
    metrics: Mapping[str, float] | None
    queued_at: float
    started_at: float
    finished_at: float
    position: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord(Record):
    """How much of one thing was used within one hour."""

    tenant_id: str
    session_id: str
    run_id: str
    base_model: str
    kind: str
    hour: int
    amount: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord(Record):
    """Something worth remembering that a tenant did."""

    tenant_id: str
    at: float
    event: str
    details: Mapping[str, Any]
    run_id: str | None = None
    tinker_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord(Record):
    """A process that serves this store."""

    id: str
    role: str
    bell: str
    started_at: float
    seen_at: float
