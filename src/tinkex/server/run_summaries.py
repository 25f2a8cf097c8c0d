"""Training runs as lists and pages show them: name, state, step and newest metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinkex.server.run_states import RunProgressState, RunWorkload, derive_state, run_name
from tinkex.server.run_steps import list_newest_steps
from tinkex.store import overview, sessions
from tinkex.store.database import Connection
from tinkex.store.records import RunRecord, SessionRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A training run at one moment."""

    run: RunRecord
    session: SessionRecord
    name: str | None
    state: RunProgressState
    workload: RunWorkload
    metrics: Mapping[str, float]
    """Those of its newest optimizer step, with `loss` if that is known."""
    active_at: float
    """When it was last used, or completed an optimizer step."""


def summarize_runs(db: Connection, runs: Sequence[RunRecord], now: float) -> list[RunSummary]:
    """What is known about these runs, which all belong to one tenant."""
    if not runs:
        return []
    session_ids = {run.session_id for run in runs}
    tenant_id = runs[0].tenant_id
    known = sessions.find_many(db, session_ids)
    work = overview.open_jobs_by_run(db, tenant_id, [run.id for run in runs])
    sampling = overview.sessions_with_open_samples(db, tenant_id, session_ids)
    summaries = []
    for run in runs:
        num_queued, num_running = work.get(run.id, (0, 0))
        workload = RunWorkload(num_queued=num_queued, num_running=num_running)
        metrics, active_at = _newest_metrics(db, run)
        if run.session_id in sampling:
            # Reinforcement learning draws samples between two optimizer steps.
            active_at = now
        session = known[run.session_id]
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
    found = list_newest_steps(db, run, 1)
    if not found:
        return {}, run.used_at
    step = found[0]
    told = {} if step.loss is None else {"loss": step.loss}
    return told | step.metrics, max(run.used_at, step.finished_at.timestamp())
