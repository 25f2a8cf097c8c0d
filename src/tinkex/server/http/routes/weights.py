"""Weights endpoints: save, load, describe and copy checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypeAlias

from tinkex import clock, types
from tinkex.checkpoint.storage import FileStorage
from tinkex.errors import (
    BadRequestError,
    CheckpointError,
    StoreError,
    TinkexError,
    UnprocessableEntityError,
)
from tinkex.ids import TinkerPath, check_name, check_ttl, new_id, parse_tinker_path
from tinkex.jobs.job_types import JobKind, LoadPayload
from tinkex.jobs.quotas import QuotaExceeded
from tinkex.server.http.checkpoint_copies import copy_files, insert_copy, resolve_destination
from tinkex.server.http.model_specs import (
    insert_run,
    lora_options,
    require_trainable_model,
    spec_for_load,
    stored_spec,
)
from tinkex.server.http.ownership import (
    require_checkpoint,
    require_open_session,
    require_readable_checkpoint,
    resolve_readers,
)
from tinkex.server.http.request_context import Handler, RequestContext, Services
from tinkex.server.http.store_access import read, record_checkpoint_event, write
from tinkex.server.http.submission import (
    build_model_id,
    job_key,
    operation_key,
    skip_sequence_number,
    submit_job,
    submit_operation,
)
from tinkex.server.http.validation import check_number
from tinkex.store import checkpoints, idempotency, jobs
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, NewJob, RunRecord
from tinkex.system.atomic import remove_directory
from tinkex.wire.codec import encode_json
from tinkex.wire.messages import WeightsInfoRequest

_SaveRequest: TypeAlias = (
    types.SaveWeightsRequest | types.SaveWeightsForSamplerRequest | types.SaveWeightsExternalRequest
)
_SEGMENT_BY_KIND = {
    JobKind.SAVE_WEIGHTS: "weights",
    JobKind.SAVE_WEIGHTS_FOR_SAMPLER: "sampler_weights",
    JobKind.SAVE_WEIGHTS_EXTERNAL: "external_weights",
}


# --- saving ----------------------------------------------------------------------------------
async def save_weights(
    services: Services, context: RequestContext[types.SaveWeightsRequest]
) -> types.UntypedAPIFuture:
    """Submit a save of a training checkpoint: weights and optimizer state."""
    request = context.request
    return await _submit_save(services, context, JobKind.SAVE_WEIGHTS, request.path)


async def save_weights_for_sampler(
    services: Services, context: RequestContext[types.SaveWeightsForSamplerRequest]
) -> types.UntypedAPIFuture:
    """Submit a save of sampler weights: named, or for one new sampling session."""
    request = context.request
    check_number("sampling_session_seq_id", request.sampling_session_seq_id)
    if request.path is None and request.sampling_session_seq_id is None:
        raise UnprocessableEntityError(
            "save_weights_for_sampler needs path or sampling_session_seq_id"
        )
    return await _submit_save(services, context, JobKind.SAVE_WEIGHTS_FOR_SAMPLER, request.path)


async def save_weights_external(
    services: Services, context: RequestContext[types.SaveWeightsExternalRequest]
) -> types.UntypedAPIFuture:
    """Submit a save of weights in a format for other tools."""
    return await _submit_save(
        services, context, JobKind.SAVE_WEIGHTS_EXTERNAL, context.request.path
    )


async def _submit_save(
    services: Services, context: RequestContext[_SaveRequest], kind: JobKind, name: str | None
) -> types.UntypedAPIFuture:
    if name is not None:
        check_name(name)
    check_ttl(context.request.ttl_seconds)
    model_id, seq_id = context.request.model_id, context.request.seq_id
    is_unnamed = kind == JobKind.SAVE_WEIGHTS_FOR_SAMPLER and name is None
    # Without a name the worker generates a new one, so the quota check needs no path.
    path = None if is_unnamed else TinkerPath(model_id, _SEGMENT_BY_KIND[kind], name or "")

    def check_quota(db: Connection, _: RunRecord) -> None:
        services.quotas.check_checkpoint(db, context.tenant_id, path)

    try:
        return await submit_operation(
            services, context, kind, model_id, seq_id, extra_prepare=check_quota
        )
    except QuotaExceeded:
        # The model's next operation must not wait for this one.
        await skip_sequence_number(services, context, kind, model_id, seq_id)
        raise


# --- loading ---------------------------------------------------------------------------------
async def load_weights(
    services: Services, context: RequestContext[types.LoadWeightsRequest]
) -> types.UntypedAPIFuture:
    """Submit a load of weights into a model, or into a new one."""
    request = context.request
    if request.model_id is None:
        return await _submit_create_from_checkpoint(services, context)
    model_id, seq_id = request.model_id, request.seq_id
    source = await _find_source(services, context, operation_key(context, model_id, seq_id))
    return await submit_operation(
        services,
        context,
        JobKind.LOAD_WEIGHTS,
        model_id,
        seq_id,
        payload=_build_load_payload(request, source),
        extra_prepare=lambda db, _: _record_load(db, context, source, model_id),
    )


async def _submit_create_from_checkpoint(
    services: Services, context: RequestContext[types.LoadWeightsRequest]
) -> types.UntypedAPIFuture:
    request, tenant_id, session_id = context.request, context.tenant_id, context.request.session_id
    number = check_number("model_seq_id", request.model_seq_id)
    if session_id is None or number is None:
        raise UnprocessableEntityError(
            "load_weights needs model_id, or session_id and model_seq_id"
        )
    key = job_key("model", tenant_id, session_id, number)
    run_id = build_model_id(session_id, number)
    source = await _find_source(services, context, key)

    def prepare(db: Connection) -> None:
        session = require_open_session(db, tenant_id, session_id)
        assert source is not None  # None only for a repeated request, which is not prepared
        spec = spec_for_load(request, source, services.config.shards_per_model)
        require_trainable_model(db, spec.base_model)
        group_id = services.queue.place_run(db, run_id, spec.base_model)
        insert_run(db, session, run_id, spec, request.user_metadata, group_id=group_id)
        _record_load(db, context, source, run_id)

    new = NewJob(
        id="",
        tenant_id=tenant_id,
        session_id=session_id,
        kind=JobKind.LOAD_WEIGHTS,
        key=key,
        run_id=run_id,
        position=0,
        payload=_build_load_payload(request, source),
    )
    return await submit_job(services, new, prepare)


async def _find_source(
    services: Services, context: RequestContext[types.LoadWeightsRequest], key: str | None
) -> CheckpointRecord | None:
    """The checkpoint to load; None for a repeated request, whose checkpoint may be deleted."""
    path = parse_tinker_path(context.request.path)
    readers = await resolve_readers(services, context, context.request.weights_access_token)

    def query(db: Connection) -> CheckpointRecord | None:
        if key is not None and jobs.find_by_key(db, key) is not None:
            return None
        return require_readable_checkpoint(db, readers, path, clock.now())

    source = await read(services, query)
    if source is not None and source.segment != "weights":
        raise BadRequestError(f"{path} is not a training checkpoint and cannot be loaded")
    return source


def _build_load_payload(
    request: types.LoadWeightsRequest, source: CheckpointRecord | None
) -> bytes:
    if source is None:
        return b""
    return encode_json(
        LoadPayload(
            path=request.path,
            checkpoint_id=source.id,
            with_optimizer=request.optimizer,
            place=source.place,
        )
    )


def _record_load(
    db: Connection, context: RequestContext[object], source: CheckpointRecord | None, model_id: str
) -> None:
    if source is not None:
        record_checkpoint_event(
            db, context.identity, "checkpoint_loaded", source, model_id=model_id
        )


# --- info and copies -------------------------------------------------------------------------
async def weights_info(
    services: Services, context: RequestContext[WeightsInfoRequest]
) -> types.WeightsInfoResponse:
    """Return the base model, LoRA settings and optimizer of a checkpoint."""
    path = parse_tinker_path(context.request.tinker_path)
    readers = await resolve_readers(services, context)
    source = await read(
        services, lambda db: require_readable_checkpoint(db, readers, path, clock.now())
    )
    spec = stored_spec(source)
    fields = {
        "base_model": spec.base_model,
        "is_lora": True,
        "lora_rank": spec.rank,
        "train_unembed": spec.train_unembed,
        "train_mlp": spec.train_mlp,
        "train_attn": spec.train_attn,
        "optimizer_config": source.spec["optimizer"],
    }
    return types.WeightsInfoResponse.model_validate(fields | lora_options(spec))


async def copy_weights(
    services: Services, context: RequestContext[types.CopyWeightsRequest]
) -> types.CopyWeightsResponse:
    """Copy a checkpoint to the caller; idempotent for the same idempotency key."""
    request, tenant_id = context.request, context.tenant_id
    check_ttl(request.ttl_seconds)
    check_number("model_seq_id", request.model_seq_id)
    path = parse_tinker_path(request.source_path)
    readers = await resolve_readers(services, context, request.weights_access_token)

    def query(db: Connection) -> str | CheckpointRecord:
        repeated = _find_repeated_reply(db, context)
        if repeated is not None:
            return repeated
        # Checked before any file is copied.
        resolve_destination(db, tenant_id, request)
        source = require_readable_checkpoint(db, readers, path, clock.now())
        target_path = path._replace(run_id="")
        services.quotas.check_checkpoint(db, tenant_id, target_path, source.size_bytes)
        return source

    reply_or_source = await read(services, query)
    if isinstance(reply_or_source, str):
        return types.CopyWeightsResponse(tinker_path=reply_or_source)
    copy_path = await _copy_checkpoint(services, context, reply_or_source)
    return types.CopyWeightsResponse(tinker_path=copy_path)


async def _copy_checkpoint(
    services: Services, context: RequestContext[types.CopyWeightsRequest], source: CheckpointRecord
) -> str:
    copy_id = new_id()
    target = services.home.checkpoint_directory(copy_id)
    try:
        await asyncio.to_thread(_copy_files_in_home, services.storage, source, target)
    except CheckpointError:
        # If the checkpoint was deleted in the meantime, report that instead.
        await read(
            services, lambda db: require_checkpoint(db, source.tenant_id, source.path, clock.now())
        )
        raise

    def transaction(db: Connection) -> tuple[str, bool]:
        repeated = _find_repeated_reply(db, context)
        if repeated is not None:
            return repeated, False
        if source.place and not checkpoints.lock_live(db, source.id, clock.now()):
            # Its place in the object store may be removed.
            require_checkpoint(db, source.tenant_id, source.path, clock.now())
        destination = resolve_destination(db, context.tenant_id, context.request)
        target_path = source.path._replace(run_id=destination.run_id)
        services.quotas.check_checkpoint(db, context.tenant_id, target_path, source.size_bytes)
        copy = insert_copy(db, source, copy_id, destination, context.request.ttl_seconds)
        record_checkpoint_event(
            db, context.identity, "checkpoint_copied", copy, source=str(source.path)
        )
        _store_reply(db, context, str(copy.path))
        return str(copy.path), True

    try:
        path, is_inserted = await write(services, transaction)
    except (asyncio.CancelledError, StoreError):
        # The record may have been inserted; housekeeping removes files without a record.
        raise
    except TinkexError:
        await asyncio.to_thread(remove_directory, target)
        raise
    if not is_inserted:
        await asyncio.to_thread(remove_directory, target)
    return path


def _copy_files_in_home(storage: FileStorage, source: CheckpointRecord, target: Path) -> None:
    """Copy the files of a checkpoint, unless they are in the object store, which copies share."""
    if not source.place:
        with storage.open_checkpoint(source.id, source.place, source.path) as directory:
            copy_files(directory, target)


def _find_repeated_reply(db: Connection, context: RequestContext[object]) -> str | None:
    key = context.idempotency_key
    return idempotency.find_response(db, context.tenant_id, context.endpoint, key) if key else None


def _store_reply(db: Connection, context: RequestContext[object], reply: str) -> None:
    key = context.idempotency_key
    if key:
        idempotency.save_response(db, context.tenant_id, context.endpoint, key, reply, clock.now())


ROUTES: dict[str, Handler] = {
    "save_weights": save_weights,
    "save_weights_for_sampler": save_weights_for_sampler,
    "save_weights_external": save_weights_external,
    "load_weights": load_weights,
    "weights_info": weights_info,
    "copy_weights": copy_weights,
}
