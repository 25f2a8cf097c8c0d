"""Records of the store in the words of the API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, cast

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
    """Seconds since 1970 as a time."""
    return datetime.fromtimestamp(seconds, UTC)


def owner_urn(tenant_id: str) -> str:
    """How a tenant is called in answers."""
    return CallerIdentity(tenant_id=tenant_id, key_id=0).urn


def stringify_metadata(user_metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """What a user attached to something; values that are no text are shown as JSON."""
    if user_metadata is None:
        return None
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in user_metadata.items()
    }


def serialize_checkpoint(checkpoint: CheckpointRecord) -> types.Checkpoint:
    """A checkpoint as lists show it."""
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
    )


def serialize_run(
    run: RunRecord, newest: Mapping[str, CheckpointRecord], summary: RunSummary | None
) -> types.TrainingRun:
    """A run as lists show it, with its newest checkpoint of each kind.

    Only its owner sees what is attached to it and how it goes: for others there is no summary, also
    when a checkpoint is published.
    """
    shown = {kind: serialize_checkpoint(checkpoint) for kind, checkpoint in newest.items()}
    return types.TrainingRun(
        training_run_id=run.id,
        base_model=run.base_model,
        model_owner=owner_urn(run.tenant_id),
        is_lora=True,
        corrupted=run.state == RunState.CORRUPTED,
        lora_rank=run.spec["rank"],
        last_request_time=to_datetime(run.used_at),
        last_checkpoint=shown.get("weights"),
        last_sampler_checkpoint=shown.get("sampler_weights"),
        user_metadata=None if summary is None else stringify_metadata(run.user_metadata),
        name=None if summary is None else summary.name,
        state=None if summary is None else summary.state,
        step=None if summary is None else run.num_steps,
        metrics=None if summary is None else dict(summary.metrics),
        created_at=None if summary is None else to_datetime(run.created_at),
    )


def serialize_session(facts: SessionWithStorage) -> types.SessionSummary:
    """A session as a search shows it."""
    session = facts.session
    return types.SessionSummary(
        session_id=session.id,
        created_at=to_datetime(session.created_at),
        owner=owner_urn(session.tenant_id),
        project_id=session.project_id,
        status=_session_status(session),
        checkpoints_count=facts.num_checkpoints,
        display_name=session.display_name,
        user_metadata=stringify_metadata(session.user_metadata),
        checkpoint_storage_bytes=facts.checkpoint_bytes,
    )


def _session_status(session: SessionRecord) -> types.SessionStatus:
    if session.finished_at is not None:
        reason = _FINISH_REASONS[session.finish_reason or "success"]
        return types.ClientSessionFinished(reason=reason, detail=session.finish_detail)
    if session.expired_at is not None:
        return types.SessionCancelled(detail="its client was not heard of any more")
    return types.SessionActive()


#: The version of a client that does not state one; it gets the current form of every reply.
NEWEST_VERSION: Final = (1 << 31, 0, 0)
#: The first SDK whose `CheckpointType` has "external"; older ones reject a list that contains it.
FIRST_WITH_EXTERNAL: Final = (0, 28, 0)

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")
_USER_AGENT = re.compile(r"(?:Async)?Tinker/Python (\S+)")


def client_version(
    context: RequestContext[Any], session_sdk_version: str = ""
) -> tuple[int, int, int]:
    """The SDK version as three numbers, or `NEWEST`; never a reason to refuse a request.

    The first of these that has a version decides: the header X-Stainless-Package-Version, the
    User-Agent of the official SDK, and the version that created the session of the request.
    """
    agent = context.headers.get("user-agent", "")
    if agent.startswith("tinkex/"):
        return NEWEST_VERSION
    found = _USER_AGENT.match(agent)
    stated = context.headers.get("x-stainless-package-version", "")
    for text in (stated, found[1] if found else "", session_sdk_version):
        if version := _VERSION.match(text):
            major, minor, patch = (int(part or 0) for part in version.groups())
            return major, minor, patch
    return NEWEST_VERSION


def run_session_status(session: SessionRecord) -> types.RunSessionStatus:
    """Where a session is in its life, in one word."""
    if session.finished_at is not None:
        return "finished"
    return "lost" if session.expired_at is not None else "active"
