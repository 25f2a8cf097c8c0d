"""The state of a training run in a word that people recognize, from what the store knows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tinkex.store.records import RunRecord, RunState, SessionRecord

#: A run whose client sent or received something within this time counts as training.
ACTIVE_SECONDS = 15.0


class RunProgressState(StrEnum):
    """What a training run is doing, or how it ended."""

    TRAINING = "training"  #: an operation runs, or the last one ended a moment ago
    WAITING = "waiting"  #: operations are queued and none runs
    IDLE = "idle"  #: the client is connected and sends nothing
    FINISHED = "finished"  #: the client ended and reported success
    INTERRUPTED = "interrupted"  #: the client was interrupted, or its heartbeats stopped
    FAILED = "failed"  #: the model could not be created, lost its state, or its client failed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWorkload:
    """Operations of a run that have no result yet."""

    num_queued: int = 0
    num_running: int = 0


_STATE_BY_REASON = {
    "success": RunProgressState.FINISHED,
    "errored": RunProgressState.FAILED,
    "interrupted": RunProgressState.INTERRUPTED,
}


def derive_state(
    run: RunRecord, session: SessionRecord, workload: RunWorkload, active_at: float, now: float
) -> RunProgressState:
    """The state of a run; `active_at` is when it was last used or completed an operation."""
    if run.state in {RunState.FAILED, RunState.CORRUPTED}:
        return RunProgressState.FAILED
    if workload.num_running:
        return RunProgressState.TRAINING
    if workload.num_queued:
        return RunProgressState.WAITING
    ended = _final_state(run, session)
    if ended is not None:
        return ended
    if run.state == RunState.CREATING:
        return RunProgressState.WAITING
    is_active = now - active_at < ACTIVE_SECONDS
    return RunProgressState.TRAINING if is_active else RunProgressState.IDLE


def _final_state(run: RunRecord, session: SessionRecord) -> RunProgressState | None:
    """How a run without open operations ended; None if its client can continue it."""
    if session.finished_at is not None:
        return _STATE_BY_REASON.get(session.finish_reason or "", RunProgressState.FINISHED)
    if session.expired_at is not None:
        return RunProgressState.INTERRUPTED
    return RunProgressState.FINISHED if run.state == RunState.UNLOADED else None


def run_name(run: RunRecord, session: SessionRecord) -> str | None:
    """The name of a run: its own, else that of its session."""
    named = (run.user_metadata or {}).get("name")
    return named if isinstance(named, str) and named.strip() else session.display_name
