"""Ownership checks: look up resources of the caller's tenant, or raise NotFoundError.

A resource of another tenant gives the same error as one that does not exist.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NoReturn

from tinkex.errors import BadRequestError, NotFoundError
from tinkex.ids import TYPE_BY_SEGMENT, TinkerPath, check_id, check_name
from tinkex.server.http.auth import identify
from tinkex.server.http.request_context import RequestContext, Services
from tinkex.store import checkpoints, runs, samplers, sessions
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, RunRecord, RunState, SamplerRecord, SessionRecord

_TRAINABLE = frozenset({RunState.CREATING, RunState.READY})
_NOT_TRAINABLE_REASONS = {
    RunState.UNLOADED: "was unloaded; to continue, create a model from one of its checkpoints",
    RunState.FAILED: "could not be created; create a new one",
    RunState.CORRUPTED: (
        "has lost its state, which is damaged on disk; to continue, create a model from one of "
        "its checkpoints"
    ),
}


def require_session(db: Connection, tenant_id: str, session_id: str) -> SessionRecord:
    """Return a session of this tenant."""
    session = sessions.find(db, check_id("session id", session_id))
    if session is None or session.tenant_id != tenant_id:
        _raise_not_found("session", session_id)
    return session


def require_open_session(db: Connection, tenant_id: str, session_id: str) -> SessionRecord:
    """Return a session of this tenant that its client has not finished."""
    session = require_session(db, tenant_id, session_id)
    if session.finished_at is not None:
        raise BadRequestError(
            f"session {session_id!r} was finished by its client; create a new session"
        )
    return session


def require_run(db: Connection, tenant_id: str, run_id: str, resource: str = "model") -> RunRecord:
    """Return a model of this tenant in any state."""
    run = runs.find(db, check_id(f"{resource} id", run_id))
    if run is None or run.tenant_id != tenant_id:
        _raise_not_found(resource, run_id)
    return run


def require_trainable_run(db: Connection, tenant_id: str, run_id: str) -> RunRecord:
    """Return a model of this tenant that accepts operations."""
    run = require_run(db, tenant_id, run_id)
    if run.state not in _TRAINABLE:
        raise BadRequestError(f"model {run_id!r} {_NOT_TRAINABLE_REASONS[RunState(run.state)]}")
    return run


def require_sampler(db: Connection, tenant_id: str, sampler_id: str) -> SamplerRecord:
    """Return a sampling session of this tenant."""
    sampler = samplers.find(db, check_id("sampling session id", sampler_id))
    if sampler is None or sampler.tenant_id != tenant_id:
        _raise_not_found("sampling session", sampler_id)
    return sampler


def checkpoint_path(run_id: str, checkpoint_id: str) -> TinkerPath:
    """The tinker path of a checkpoint from the two parts in a URL."""
    segment, _, name = checkpoint_id.partition("/")
    if segment not in TYPE_BY_SEGMENT:
        _raise_not_found("checkpoint", f"tinker://{run_id}/{checkpoint_id}")
    return TinkerPath(check_id("run id", run_id), segment, check_name(name))


def require_checkpoint(
    db: Connection, tenant_id: str, path: TinkerPath, now: float
) -> CheckpointRecord:
    """Return a checkpoint of this tenant."""
    checkpoint = checkpoints.find(db, path, now)
    if checkpoint is None or checkpoint.tenant_id != tenant_id:
        _raise_not_found("checkpoint", str(path))
    return checkpoint


def require_readable_checkpoint(
    db: Connection, readers: Collection[str], path: TinkerPath, now: float
) -> CheckpointRecord:
    """Return a checkpoint that is public or belongs to one of these tenants."""
    checkpoint = checkpoints.find(db, path, now)
    if checkpoint is None or not (checkpoint.is_public or checkpoint.tenant_id in readers):
        _raise_not_found("checkpoint", str(path))
    return checkpoint


def _raise_not_found(resource: str, name: str) -> NoReturn:
    raise NotFoundError(f"{resource} {name!r} does not exist")


#: Carries a credential of the tenant that owns the weights.
WEIGHTS_TOKEN_HEADER: Final = "x-tinker-weights-access-token"


async def resolve_readers(
    services: Services, context: RequestContext[object], token: str | None = None
) -> frozenset[str]:
    """The tenants whose checkpoints a request may read: the caller and the owner of `token`."""
    credential = context.headers.get(WEIGHTS_TOKEN_HEADER) or token
    owner = await identify(services, credential) if credential else None
    # An invalid credential is ignored: an error of its own would help guessing.
    return frozenset({context.tenant_id, owner.tenant_id if owner else context.tenant_id})
