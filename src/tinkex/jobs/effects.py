"""What is written down together with an outcome, in its transaction."""

from __future__ import annotations

from dataclasses import replace

from tinkex import clock
from tinkex.jobs.outcomes import Effect
from tinkex.store import audit, checkpoints, runs, samplers, sessions, usage
from tinkex.store.database import Connection
from tinkex.store.records import AuditEntry, Checkpoint, Job, RunState, Sampler


def set_run_state(run_id: str, state: RunState) -> Effect:
    """Move a model on in its life."""
    return lambda db: runs.set_state(db, run_id, state)


def count_usage(job: Job, *, run_id: str, base_model: str, kind: str, amount: int) -> Effect:
    """Add to what a tenant has used."""

    def effect(db: Connection) -> None:
        if amount > 0:
            usage.add(
                db,
                tenant_id=job.tenant_id,
                session_id=job.session_id,
                run_id=run_id,
                base_model=base_model,
                kind=kind,
                amount=amount,
                now=clock.now(),
            )

    return effect


def enter_checkpoint(job: Job, saved: Checkpoint) -> tuple[Effect, ...]:
    """Make saved weights known, in place of those that had the same address."""

    def enter(db: Connection) -> None:
        before = checkpoints.find(db, saved.path, saved.created_at)
        if before is not None:
            checkpoints.delete(db, before.id, saved.created_at)
        session = sessions.find(db, saved.session_id)
        project_id = session.project_id if session is not None else saved.project_id
        checkpoints.insert(db, replace(saved, project_id=project_id))

    if saved.is_ephemeral:
        return (enter,)
    counted = count_usage(
        job, run_id=saved.run_id, base_model=saved.base_model, kind="checkpoint", amount=1
    )
    return enter, counted, _note_saved(job, saved)


def _note_saved(job: Job, saved: Checkpoint) -> Effect:
    entry = AuditEntry(
        tenant_id=job.tenant_id,
        at=saved.created_at,
        event="checkpoint_saved",
        details={
            "checkpoint_id": saved.path.checkpoint_id,
            "tinker_path": str(saved.path),
            "request_id": job.id,
        },
        run_id=saved.run_id,
        tinker_path=str(saved.path),
    )
    return lambda db: audit.note(db, entry)


def supersede_unnamed(saved: Checkpoint, kept: int) -> Effect:
    """Delete the model's older unnamed sampler weights, so that they do not pile up."""

    def effect(db: Connection) -> None:
        checkpoints.supersede(db, saved.run_id, kept, saved.created_at)

    return effect


def open_sampler(sampler_id: str, saved: Checkpoint) -> Effect:
    """Open a sampling session on weights that are saved for it alone."""
    sampler = Sampler(
        id=sampler_id,
        tenant_id=saved.tenant_id,
        session_id=saved.session_id,
        base_model=saved.base_model,
        model_path=None,
        checkpoint_id=saved.id,
        created_at=saved.created_at,
    )
    return lambda db: samplers.insert(db, sampler)
