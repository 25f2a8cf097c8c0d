"""Convert records of the store to API types, in the form that the client's version reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, cast

from tinkex import types
from tinkex.server.http.request_context import CallerIdentity, RequestContext
from tinkex.server.http.run_summaries import RunSummary
from tinkex.store.records import CheckpointRecord, RunRecord, RunState, SessionRecord
from tinkex.store.sessions import SessionWithStorage

_FINISH_REASONS: Mapping[str, types.ClientSessionFinishReason] = {
    "success": types.ClientSessionFinishSuccess(),
    "errored": types.ClientSessionFinishErrored(),
    "interrupted": types.ClientSessionFinishInterrupted(),
}


def to_datetime(seconds: float) -> datetime:
    """Convert seconds since 1970 to a UTC datetime."""
    return datetime.fromtimestamp(seconds, UTC)


def owner_urn(tenant_id: str) -> str:
    """The tenant's name in responses."""
    return CallerIdentity(tenant_id=tenant_id, key_id=0).urn


def stringify_metadata(user_metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """User metadata with all values as strings; values of other types become JSON."""
    if user_metadata is None:
        return None
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in user_metadata.items()
    }


def serialize_checkpoint(checkpoint: CheckpointRecord) -> types.Checkpoint:
    """Convert a checkpoint for lists."""
    path, expires_at = checkpoint.path, checkpoint.expires_at
    return types.Checkpoint(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=cast("types.CheckpointType", path.checkpoint_type),
        time=to_datetime(checkpoint.created_at),
        tinker_path=str(path),
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.is_public,
        user_metadata=stringify_metadata(checkpoint.user_metadata),
        expires_at=None if expires_at is None else to_datetime(expires_at),
        base_model=checkpoint.base_model,
    )


def serialize_run(
    run: RunRecord, newest: Mapping[str, CheckpointRecord], summary: RunSummary | None
) -> types.TrainingRun:
    """Convert a run for lists, with its newest checkpoint of each kind.

    Only its owner sees metadata and progress: for other tenants, who see a run if one of its
    checkpoints is public, `summary` is None.
    """
    serialized = {kind: serialize_checkpoint(checkpoint) for kind, checkpoint in newest.items()}
    return types.TrainingRun(
        training_run_id=run.id,
        base_model=run.base_model,
        model_owner=owner_urn(run.tenant_id),
        is_lora=True,
        corrupted=run.state == RunState.CORRUPTED,
        lora_rank=run.spec["rank"],
        last_request_time=to_datetime(run.used_at),
        last_checkpoint=serialized.get("weights"),
        last_sampler_checkpoint=serialized.get("sampler_weights"),
        user_metadata=None if summary is None else stringify_metadata(run.user_metadata),
        name=None if summary is None else summary.name,
        state=None if summary is None else summary.state,
        step=None if summary is None else run.num_steps,
        metrics=None if summary is None else dict(summary.metrics),
        created_at=None if summary is None else to_datetime(run.created_at),
    )


def serialize_session(row: SessionWithStorage) -> types.SessionSummary:
    """Convert a session for search results."""
    session = row.session
    return types.SessionSummary(
        session_id=session.id,
        created_at=to_datetime(session.created_at),
        owner=owner_urn(session.tenant_id),
        project_id=session.project_id,
        status=_session_status(session),
        checkpoints_count=row.num_checkpoints,
        display_name=session.display_name,
        user_metadata=stringify_metadata(session.user_metadata),
        checkpoint_storage_bytes=row.checkpoint_bytes,
    )


def _session_status(session: SessionRecord) -> types.SessionStatus:
    if session.finished_at is not None:
        reason = _FINISH_REASONS[session.finish_reason or "success"]
        return types.ClientSessionFinished(reason=reason, detail=session.finish_detail)
    if session.expired_at is not None:
        return types.SessionCancelled(detail="the client stopped sending heartbeats")
    return types.SessionActive()


#: The version of a client that does not state one; it gets current replies.
NEWEST_VERSION: Final = (1 << 31, 0, 0)
#: The first SDK whose `CheckpointType` has "external"; older ones reject a list that contains it.
FIRST_WITH_EXTERNAL: Final = (0, 28, 0)

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")
_USER_AGENT = re.compile(r"(?:Async)?Tinker/Python (\S+)")


def client_version(
    context: RequestContext[object], session_sdk_version: str = ""
) -> tuple[int, int, int]:
    """The SDK version as three numbers, or `NEWEST_VERSION`; never raises.

    Sources, in order: the header X-Stainless-Package-Version, the User-Agent of the official SDK,
    and the version that created the session of the request.
    """
    agent = context.headers.get("user-agent", "")
    if agent.startswith("tinkex/"):
        return NEWEST_VERSION
    match = _USER_AGENT.match(agent)
    package_version = context.headers.get("x-stainless-package-version", "")
    for text in (package_version, match[1] if match else "", session_sdk_version):
        if version := _VERSION.match(text):
            major, minor, patch = (int(part or 0) for part in version.groups())
            return major, minor, patch
    return NEWEST_VERSION


def run_session_status(session: SessionRecord) -> types.RunSessionStatus:
    """The status of a session: active, finished or lost."""
    if session.finished_at is not None:
        return "finished"
    return "lost" if session.expired_at is not None else "active"
