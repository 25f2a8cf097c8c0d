"""What is written down together with an outcome, in its transaction."""

from __future__ import annotations

from dataclasses import replace

from tinkex import clock
from tinkex.jobs.outcomes import Effect
from tinkex.store import audit, checkpoints, runs, samplers, sessions, usage
from tinkex.store.database import Connection
from tinkex.store.records import AuditRecord, CheckpointRecord, JobRecord, RunState, SamplerRecord


def set_run_state(run_id: str, state: RunState) -> Effect:
    """Move a model on in its life."""
    return lambda db: runs.set_state(db, run_id, state)


def count_usage(job: JobRecord, *, run_id: str, base_model: str, kind: str, amount: int) -> Effect:
    """Add to what a tenant has used."""

    def effect(db: Connection) -> None:
        if amount > 0:
            usage.add_usage(
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


def insert_checkpoint(job: JobRecord, checkpoint: CheckpointRecord) -> tuple[Effect, ...]:
    """Make saved weights known, in place of those that had the same address."""

    def enter(db: Connection) -> None:
        before = checkpoints.find(db, checkpoint.path, checkpoint.created_at)
        if before is not None:
            checkpoints.delete(db, before.id, checkpoint.created_at)
        session = sessions.find(db, checkpoint.session_id)
        project_id = session.project_id if session is not None else checkpoint.project_id
        checkpoints.insert(db, replace(checkpoint, project_id=project_id))

    if checkpoint.is_ephemeral:
        return (enter,)
    counted = count_usage(
        job, run_id=checkpoint.run_id, base_model=checkpoint.base_model, kind="checkpoint", amount=1
    )
    return enter, counted, _audit_saved(job, checkpoint)


def _audit_saved(job: JobRecord, checkpoint: CheckpointRecord) -> Effect:
    entry = AuditRecord(
        tenant_id=job.tenant_id,
        at=checkpoint.created_at,
        event="checkpoint_saved",
        details={
            "checkpoint_id": checkpoint.path.checkpoint_id,
            "tinker_path": str(checkpoint.path),
            "request_id": job.id,
        },
        run_id=checkpoint.run_id,
        tinker_path=str(checkpoint.path),
    )
    return lambda db: audit.insert_audit(db, entry)


def delete_surplus_unnamed(checkpoint: CheckpointRecord, num_kept: int) -> Effect:
    """Delete the model's older unnamed sampler weights, so that they do not pile up."""

    def effect(db: Connection) -> None:
        checkpoints.delete_surplus_unnamed(db, checkpoint.run_id, num_kept, checkpoint.created_at)

    return effect


def insert_sampler(sampler_id: str, checkpoint: CheckpointRecord) -> Effect:
    """Open a sampling session on weights that are saved for it alone."""
    sampler = SamplerRecord(
        id=sampler_id,
        tenant_id=checkpoint.tenant_id,
        session_id=checkpoint.session_id,
        base_model=checkpoint.base_model,
        model_path=None,
        checkpoint_id=checkpoint.id,
        created_at=checkpoint.created_at,
    )
    return lambda db: samplers.insert(db, sampler)
