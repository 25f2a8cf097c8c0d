"""Work that leaves weights on disk: for training on, for sampling, for other tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tinkex import clock, types
from tinkex.checkpoint.atomic import new_directory
from tinkex.checkpoint.encryption import check_recipients, encrypt_directory
from tinkex.checkpoint.manifest import SERVER_MANIFEST_NAME, write_manifest
from tinkex.errors import InvalidInput
from tinkex.ids import TinkerPath, check_name
from tinkex.jobs import payloads
from tinkex.jobs.bench import Bench, Task
from tinkex.jobs.effects import enter_checkpoint, open_sampler, supersede_unnamed
from tinkex.jobs.outcomes import Done
from tinkex.store.records import Checkpoint, Job
from tinkex.wire.codec import encode_json


def save(bench: Bench, task: Task) -> Done:
    """Save a model so that its training can go on from there."""
    request = payloads.read(task.payload, types.SaveWeightsRequest)
    path = TinkerPath(task.run.id, "weights", _name(task.job, request.path))
    if not request.overwrite:
        bench.refuse_taken(path)
    saved = _write(bench, task, path, with_optimizer=True)
    saved = _with_wishes(saved, request.ttl_seconds, request.user_metadata)
    reply = types.SaveWeightsResponse(path=str(path), type="save_weights")
    return Done(result=encode_json(reply), effects=enter_checkpoint(task.job, saved))


def save_for_sampler(bench: Bench, task: Task) -> Done:
    """Save weights to sample from: under a name, or for one sampling session alone."""
    request = payloads.read(task.payload, types.SaveWeightsForSamplerRequest)
    if request.path is None:
        return _save_ephemeral(bench, task, request.sampling_session_seq_id)
    path = TinkerPath(task.run.id, "sampler_weights", check_name(request.path))
    bench.refuse_taken(path)
    saved = _write(bench, task, path)
    saved = _with_wishes(saved, request.ttl_seconds, request.user_metadata)
    reply = types.SaveWeightsForSamplerResponse(path=str(path), type="save_weights_for_sampler")
    return Done(result=encode_json(reply), effects=enter_checkpoint(task.job, saved))


def _save_ephemeral(bench: Bench, task: Task, seq_id: int | None) -> Done:
    if seq_id is None:
        raise InvalidInput("save_weights_for_sampler needs a path or a sampling_session_seq_id")
    # No client can choose this name: a name never begins with a dot.
    path = TinkerPath(task.run.id, "sampler_weights", f".session-{seq_id}-{task.job.id}")
    saved = replace(_write(bench, task, path), is_ephemeral=True)
    sampler_id = f"{task.run.session_id}:sample:{seq_id}"
    reply = types.SaveWeightsForSamplerResponseInternal(
        sampling_session_id=sampler_id, type="save_weights_for_sampler"
    )
    effects = (
        *enter_checkpoint(task.job, saved),
        open_sampler(sampler_id, saved),
        supersede_unnamed(saved, bench.kept_unnamed),
    )
    return Done(result=encode_json(reply), effects=effects)


def save_external(bench: Bench, task: Task) -> Done:
    """Save weights for other tools, encrypted if recipients are named."""
    request = payloads.read(task.payload, types.SaveWeightsExternalRequest)
    path = TinkerPath(task.run.id, "external_weights", check_name(request.path))
    bench.refuse_taken(path)
    recipients = request.age_encryption_recipients or []
    if recipients:
        check_recipients(recipients)
    saved = _write(bench, task, path, recipients=recipients)
    saved = _with_wishes(saved, request.ttl_seconds, None)
    reply = types.SaveWeightsExternalResponseInternal(
        path=str(path), size_bytes=saved.size_bytes, type="save_weights_external"
    )
    return Done(result=encode_json(reply), effects=enter_checkpoint(task.job, saved))


def _name(job: Job, asked: str | None) -> str:
    return check_name(asked) if asked else f"{job.position:06d}"


def _write(
    bench: Bench,
    task: Task,
    path: TinkerPath,
    *,
    with_optimizer: bool = False,
    recipients: Sequence[str] = (),
) -> Checkpoint:
    """Write the files; nobody knows of them until their row is committed.

    The directory has the job's id, so that doing the job again after a crash replaces it.
    """
    job, run = task.job, task.run
    # Unnamed sampler weights have names that no client can choose.
    counted = None if path.name.startswith(".") else path
    bench.admit_checkpoint(run, counted)
    with new_directory(bench.home.checkpoint(job.id)) as directory:
        bench.engine.save(run.id, directory, with_optimizer=with_optimizer)
        manifest = write_manifest(directory)
        if recipients:
            # The manifest above is encrypted with the rest; the server checks what is on its disk.
            encrypt_directory(directory, recipients)
            manifest = write_manifest(directory, SERVER_MANIFEST_NAME)
        size_bytes = manifest.total_bytes
        # Now that its size is known; if it is refused, the directory never appears.
        bench.admit_checkpoint(run, counted, size_bytes)
    bench.verified.remember(bench.home.checkpoint(job.id))
    return Checkpoint(
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
    )


def _with_wishes(
    saved: Checkpoint, ttl_seconds: int | None, user_metadata: Mapping[str, str] | None
) -> Checkpoint:
    expires_at = None if ttl_seconds is None else saved.created_at + ttl_seconds
    return replace(saved, expires_at=expires_at, user_metadata=user_metadata)
