"""Whose is it: things are found for their owner, and for nobody else.

What belongs to another tenant is answered with the same words as what does not exist.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, NoReturn

from tinkex.errors import BadRequestError, NotFoundError
from tinkex.ids import TYPE_BY_SEGMENT, TinkerPath, check_id, check_name
from tinkex.server.http.auth import identify
from tinkex.server.http.request_context import RequestContext, Services
from tinkex.store import checkpoints, runs, samplers, sessions
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, RunRecord, RunState, SamplerRecord, SessionRecord

_TRAINABLE = frozenset({RunState.CREATING, RunState.READY})
_NOT_TRAINABLE_REASONS = {
    RunState.UNLOADED: "was unloaded; make a model from one of its checkpoints to go on",
    RunState.FAILED: "could not be made; make a new one",
    RunState.CORRUPTED: (
        "has lost its state, which is damaged on disk; make a model from one of its checkpoints "
        "to go on"
    ),
}


def require_session(db: Connection, tenant_id: str, session_id: str) -> SessionRecord:
    """A session of this tenant."""
    found = sessions.find(db, check_id("session id", session_id))
    if found is None or found.tenant_id != tenant_id:
        _raise_not_found("session", session_id)
    return found


def require_open_session(db: Connection, tenant_id: str, session_id: str) -> SessionRecord:
    """A session of this tenant in which new things can be made."""
    found = require_session(db, tenant_id, session_id)
    if found.finished_at is not None:
        raise BadRequestError(
            f"session {session_id!r} was finished by its client; open a new session"
        )
    return found


def require_run(db: Connection, tenant_id: str, run_id: str, resource: str = "model") -> RunRecord:
    """A model of this tenant, whatever its state."""
    found = runs.find(db, check_id(f"{resource} id", run_id))
    if found is None or found.tenant_id != tenant_id:
        _raise_not_found(resource, run_id)
    return found


def require_trainable_run(db: Connection, tenant_id: str, run_id: str) -> RunRecord:
    """A model of this tenant that takes operations."""
    found = require_run(db, tenant_id, run_id)
    if found.state not in _TRAINABLE:
        raise BadRequestError(f"model {run_id!r} {_NOT_TRAINABLE_REASONS[RunState(found.state)]}")
    return found


def require_sampler(db: Connection, tenant_id: str, sampler_id: str) -> SamplerRecord:
    """A sampling session of this tenant."""
    found = samplers.find(db, check_id("sampling session id", sampler_id))
    if found is None or found.tenant_id != tenant_id:
        _raise_not_found("sampling session", sampler_id)
    return found


def checkpoint_path(run_id: str, checkpoint_id: str) -> TinkerPath:
    """The address that two parts of a URL make."""
    segment, _, name = checkpoint_id.partition("/")
    if segment not in TYPE_BY_SEGMENT:
        _raise_not_found("checkpoint", f"tinker://{run_id}/{checkpoint_id}")
    return TinkerPath(check_id("run id", run_id), segment, check_name(name))


def require_checkpoint(
    db: Connection, tenant_id: str, path: TinkerPath, now: float
) -> CheckpointRecord:
    """A checkpoint of this tenant."""
    found = checkpoints.find(db, path, now)
    if found is None or found.tenant_id != tenant_id:
        _raise_not_found("checkpoint", str(path))
    return found


def require_readable_checkpoint(
    db: Connection, readers: Collection[str], path: TinkerPath, now: float
) -> CheckpointRecord:
    """A checkpoint that one of these tenants owns, or that everybody may read."""
    found = checkpoints.find(db, path, now)
    if found is None or not (found.is_public or found.tenant_id in readers):
        _raise_not_found("checkpoint", str(path))
    return found


def _raise_not_found(resource: str, name: str) -> NoReturn:
    raise NotFoundError(f"there is no {resource} {name!r}")


#: Carries a credential of the tenant that owns the weights.
WEIGHTS_TOKEN_HEADER: Final = "x-tinker-weights-access-token"


async def resolve_readers(
    services: Services, context: RequestContext[Any], token: str | None = None
) -> frozenset[str]:
    """The tenants in whose name a request may read: the caller, and who lent a credential."""
    given = context.headers.get(WEIGHTS_TOKEN_HEADER) or token
    if not given:
        return frozenset({context.tenant_id})
    lender = await identify(services, given)
    # A credential that opens nothing is not worth an answer of its own: it would tell a guesser.
    return frozenset(
        {context.tenant_id, lender.tenant_id if lender is not None else context.tenant_id}
    )
