"""Operations that save weights: for training, for sampling, for other tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tinkex import clock, types
from tinkex.checkpoint.encryption import check_recipients, encrypt_directory
from tinkex.checkpoint.manifest import SERVER_MANIFEST_NAME, write_manifest
from tinkex.errors import InvalidInput
from tinkex.ids import TinkerPath, check_name
from tinkex.jobs import job_types
from tinkex.jobs.job_types import Completed
from tinkex.jobs.result_log import delete_surplus_unnamed, insert_checkpoint, insert_sampler
from tinkex.jobs.worker_context import ModelTask, WorkerContext
from tinkex.store.records import CheckpointRecord, JobRecord
from tinkex.wire.codec import encode_json


def save_weights(context: WorkerContext, task: ModelTask) -> Completed:
    """Save weights and optimizer state, so that training can resume from them."""
    request = job_types.decode_payload(task.payload, types.SaveWeightsRequest)
    path = TinkerPath(task.run.id, "weights", _checkpoint_name(task.job, request.path))
    if not request.overwrite:
        context.check_path_unused(path)
    saved, upload = _write_checkpoint(context, task, path, with_optimizer=True)
    saved = _with_options(saved, request.ttl_seconds, request.user_metadata)
    reply = types.SaveWeightsResponse(path=str(path), type="save_weights")
    effects = insert_checkpoint(task.job, saved)
    return Completed(result=encode_json(reply), effects=effects, upload=upload)


def save_weights_for_sampler(context: WorkerContext, task: ModelTask) -> Completed:
    """Save weights for sampling: under a name, or unnamed for one sampling session."""
    request = job_types.decode_payload(task.payload, types.SaveWeightsForSamplerRequest)
    if request.path is None:
        return _save_ephemeral(context, task, request.sampling_session_seq_id)
    path = TinkerPath(task.run.id, "sampler_weights", check_name(request.path))
    context.check_path_unused(path)
    saved, upload = _write_checkpoint(context, task, path)
    saved = _with_options(saved, request.ttl_seconds, request.user_metadata)
    reply = types.SaveWeightsForSamplerResponse(path=str(path), type="save_weights_for_sampler")
    effects = insert_checkpoint(task.job, saved)
    return Completed(result=encode_json(reply), effects=effects, upload=upload)


def _save_ephemeral(context: WorkerContext, task: ModelTask, seq_id: int | None) -> Completed:
    if seq_id is None:
        raise InvalidInput("save_weights_for_sampler needs a path or a sampling_session_seq_id")
    # Clients cannot choose this name, because names never begin with a dot.
    path = TinkerPath(task.run.id, "sampler_weights", f".session-{seq_id}-{task.job.id}")
    saved, upload = _write_checkpoint(context, task, path)
    saved = replace(saved, is_ephemeral=True)
    sampler_id = f"{task.run.session_id}:sample:{seq_id}"
    reply = types.SaveWeightsForSamplerResponseInternal(
        sampling_session_id=sampler_id, type="save_weights_for_sampler"
    )
    effects = (
        *insert_checkpoint(task.job, saved),
        insert_sampler(sampler_id, saved),
        delete_surplus_unnamed(saved, context.max_unnamed_weights),
    )
    return Completed(result=encode_json(reply), effects=effects, upload=upload)


def save_weights_external(context: WorkerContext, task: ModelTask) -> Completed:
    """Save weights for other tools, encrypted if recipients are given."""
    request = job_types.decode_payload(task.payload, types.SaveWeightsExternalRequest)
    path = TinkerPath(task.run.id, "external_weights", check_name(request.path))
    context.check_path_unused(path)
    recipients = request.age_encryption_recipients or []
    if recipients:
        check_recipients(recipients)
    saved, upload = _write_checkpoint(context, task, path, recipients=recipients)
    saved = _with_options(saved, request.ttl_seconds, None)
    reply = types.SaveWeightsExternalResponseInternal(
        path=str(path), size_bytes=saved.size_bytes, type="save_weights_external"
    )
    effects = insert_checkpoint(task.job, saved)
    return Completed(result=encode_json(reply), effects=effects, upload=upload)


def _checkpoint_name(job: JobRecord, requested: str | None) -> str:
    return check_name(requested) if requested else f"{job.position:06d}"


def _write_checkpoint(
    context: WorkerContext,
    task: ModelTask,
    path: TinkerPath,
    *,
    with_optimizer: bool = False,
    recipients: Sequence[str] = (),
) -> tuple[CheckpointRecord, Callable[[], None] | None]:
    """Write the files of a checkpoint; they are invisible until their row is committed.

    Returns what its row will be, and the function that uploads the files, if they must be.
    """
    job, run = task.job, task.run
    # Unnamed sampler weights begin with a dot and are not counted.
    quota_path = None if path.name.startswith(".") else path
    context.check_checkpoint_quota(run, quota_path)
    with context.storage.new_checkpoint(job.id) as files:
        directory = files.directory
        context.engine.save(run.id, directory, with_optimizer=with_optimizer)
        manifest = write_manifest(directory)
        if recipients:
            # The first manifest is encrypted too; the server needs one of the encrypted files.
            encrypt_directory(directory, recipients)
            manifest = write_manifest(directory, SERVER_MANIFEST_NAME)
        size_bytes = manifest.total_bytes
        # Again, now that the size is known; a refusal discards the directory.
        context.check_checkpoint_quota(run, quota_path, size_bytes)
    record = CheckpointRecord(
        id=job.id,
        tenant_id=run.tenant_id,
        session_id=run.session_id,
        project_id="",
        run_id=path.run_id,
        segment=path.segment,
        name=path.name,
        base_model=run.base_model,
        spec=run.spec,
        size_bytes=size_bytes,
        created_at=clock.now(),
        place=files.place,
    )
    return record, files.upload if context.storage.has_blobs else None


def _with_options(
    checkpoint: CheckpointRecord, ttl_seconds: int | None, user_metadata: Mapping[str, str] | None
) -> CheckpointRecord:
    expires_at = None if ttl_seconds is None else checkpoint.created_at + ttl_seconds
    return replace(checkpoint, expires_at=expires_at, user_metadata=user_metadata)
