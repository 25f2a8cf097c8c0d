"""Summaries of training runs: state, name, newest metrics and last activity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tinkex.server.http.run_history import list_newest_steps
from tinkex.store import sessions, stats
from tinkex.store.database import Connection
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
    """The name of a run: its own, or else that of its session."""
    name = (run.user_metadata or {}).get("name")
    return name if isinstance(name, str) and name.strip() else session.display_name


def own_tags(run: RunRecord) -> list[str]:
    """The tags of a run without those of its session."""
    tags = (run.user_metadata or {}).get("tags")
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A training run at one moment."""

    run: RunRecord
    session: SessionRecord
    name: str | None
    state: RunProgressState
    workload: RunWorkload
    metrics: Mapping[str, float]
    """Metrics of the newest optimizer step, with `loss` if it is known."""
    active_at: float
    """When it was last used or completed an optimizer step."""

    @property
    def tags(self) -> list[str]:
        """The tags of the run and of its session, without repetition."""
        return list(dict.fromkeys([*own_tags(self.run), *self.session.tags]))


def summarize_runs(db: Connection, runs: Sequence[RunRecord], now: float) -> list[RunSummary]:
    """Summarize runs that belong to one tenant."""
    if not runs:
        return []
    session_ids = {run.session_id for run in runs}
    tenant_id = runs[0].tenant_id
    sessions_by_id = sessions.find_many(db, session_ids)
    open_jobs = stats.open_jobs_by_run(db, tenant_id, [run.id for run in runs])
    sampling = stats.sessions_with_open_samples(db, tenant_id, session_ids)
    summaries = []
    for run in runs:
        num_queued, num_running = open_jobs.get(run.id, (0, 0))
        workload = RunWorkload(num_queued=num_queued, num_running=num_running)
        metrics, active_at = _newest_metrics(db, run)
        if run.session_id in sampling:
            # Reinforcement learning draws samples between two optimizer steps.
            active_at = now
        session = sessions_by_id[run.session_id]
        summaries.append(
            RunSummary(
                run=run,
                session=session,
                name=run_name(run, session),
                state=derive_state(run, session, workload, active_at, now),
                workload=workload,
                metrics=metrics,
                active_at=active_at,
            )
        )
    return summaries


def _newest_metrics(db: Connection, run: RunRecord) -> tuple[dict[str, float], float]:
    """The metrics of the newest optimizer step, and when the run was last active."""
    newest = list_newest_steps(db, run, 1)
    if not newest:
        return {}, run.used_at
    step = newest[0]
    loss = {} if step.loss is None else {"loss": step.loss}
    return loss | step.metrics, max(run.used_at, step.finished_at.timestamp())
