"""Frozen records of table rows; fields are named like the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

import sqlalchemy as sa

from tinkex.ids import TinkerPath


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"  #: stored, not started
    RUNNING = "running"  #: started by the worker
    DONE = "done"  #: has a result; final
    FAILED = "failed"  #: failed or cancelled, with a reason; final


class RunState(StrEnum):
    """The state of a model."""

    CREATING = "creating"  #: its creation is queued
    READY = "ready"  #: can be trained
    FAILED = "failed"  #: its creation failed
    UNLOADED = "unloaded"  #: unloaded by its client, or unused for long
    CORRUPTED = "corrupted"  #: its state on disk is damaged; its checkpoints remain


class GroupState(StrEnum):
    """The state of a worker group."""

    READY = "ready"  #: takes new models and samples
    DRAINING = "draining"  #: hands its models over and takes no new ones
    RETIRED = "retired"  #: gone; its models were moved to other groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Base class of records."""

    @classmethod
    def from_row(cls, row: sa.Row[tuple[object, ...]]) -> Self:
        """Build a record from a row that has exactly its columns."""
        return cls(**row._mapping)

    def to_columns(self) -> dict[str, object]:
        """Return the column values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord(Record):
    """A tenant: the owner of sessions, models and checkpoints."""

    id: str
    name: str
    created_at: float
    quotas: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeyRecord(Record):
    """An API key, without its secret."""

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
    user_metadata: Mapping[str, object]
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
    user_metadata: Mapping[str, object] | None
    state: str
    created_at: float
    used_at: float
    next_seq: int = 0
    applied: int = 0
    snapshot_applied: int = 0
    snapshot: str | None = None
    forgotten_seq: int = -1
    num_steps: int = 0
    group_id: str = ""


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
    """When a sample was last requested; 0 if never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord(Record):
    """A checkpoint."""

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
    user_metadata: Mapping[str, object] | None = None
    created_at: float
    expires_at: float | None = None
    deleted_at: float | None = None
    place: str = ""
    """Where its files are in the object store; empty if they are in the home."""

    @property
    def path(self) -> TinkerPath:
        """The tinker:// path."""
        return TinkerPath(self.run_id, self.segment, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job to be stored."""

    id: str
    tenant_id: str
    session_id: str
    kind: str
    key: str | None
    """Idempotency key: a repeated request has the same key."""
    run_id: str | None = None
    sampler_id: str | None = None
    position: int | None = None
    """The sequence number within the run; None means the next free one."""
    payload: bytes
    is_proto: bool = False
    num_sequences: int = 0
    num_tokens: int = 0
    """The tokens of a pass, or the maximum tokens of a sample with its prompt."""
    base_model: str | None = None
    """The base model of a sample."""
    group_id: str = ""
    """The worker group that runs it."""
    payload_ref: str | None = None
    """Where the payload is in the object store, if it is large; `payload` is empty then."""
    payload_bytes: int | None = None
    """The size of a payload in the object store."""
    is_cancelled: bool = False
    """Whether the job only occupies its sequence number and does not run."""
    process_id: str | None = None
    """The API process whose client waits for the result: the job is cancelled if that process ends
    before it. None if the client may fetch the result later."""

    @property
    def num_bytes(self) -> int:
        """The size of the payload."""
        return len(self.payload) if self.payload_bytes is None else self.payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(Record):
    """A job, without its payload and result."""

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
    """When the cancellation of a pass was requested; the worker stops it."""
    group_id: str = ""
    payload_ref: str | None = None
    """Where its payload is in the object store, if it is large."""
    process_id: str | None = None
    """The API process whose client waits for the result."""

    @property
    def is_finished(self) -> bool:
        """Whether the job has succeeded or failed."""
        return self.state in {JobState.DONE, JobState.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(Record):
    """An executed operation with its times and metrics."""

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
    """The usage of one kind within one hour."""

    tenant_id: str
    session_id: str
    run_id: str
    base_model: str
    kind: str
    hour: int
    amount: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord(Record):
    """An audit event of a tenant."""

    tenant_id: str
    at: float
    event: str
    details: Mapping[str, object]
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
    network: str = ""
    stream_address: str = ""
    """Where a worker sends the tokens of running samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord(Record):
    """A worker group."""

    id: str
    state: str
    base_models: Sequence[Mapping[str, object]]
    models_source: str
    host: str
    load: Mapping[str, float]
    num_moves: int = 0
    started_at: float
    seen_at: float
