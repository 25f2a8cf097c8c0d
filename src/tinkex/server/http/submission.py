"""Submit requests as jobs: ordering, deduplication and checks shared by all operations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

from tinkex import types
from tinkex.checkpoint.places import BlobsUnavailable, payload_place
from tinkex.checkpoint.storage import FileStorage
from tinkex.errors import InvalidInput, PromiseExpiredError, StoreError, TinkexError
from tinkex.jobs.job_types import JobKind
from tinkex.jobs.queue import PrepareJob
from tinkex.server.http.ownership import require_open_session, require_trainable_run
from tinkex.server.http.request_context import RequestContext, Services, run_in_thread
from tinkex.server.http.store_access import await_store_future
from tinkex.server.http.validation import check_number
from tinkex.store.database import Connection
from tinkex.store.records import JobRecord, NewJob, RunRecord

PrepareOperation: TypeAlias = Callable[[Connection, RunRecord], None]

#: Payloads of this size go to the object store, if there is one.
LARGE_PAYLOAD_BYTES = 64 * 1024


async def submit_job(
    services: Services, new: NewJob, prepare: PrepareJob | None = None
) -> types.UntypedAPIFuture:
    """Store a job and return its future once it is committed."""
    if services.storage.has_blobs and is_large(new):
        job = await _submit_large(services, new, prepare)
    else:
        job = await await_store_future(services.queue.submit(new, prepare))
    sequence_ids = [f"{job.id}:{index}" for index in range(job.num_sequences)]
    return types.UntypedAPIFuture(
        request_id=job.id,
        model_id=job.run_id,
        sample_sequence_ids=sequence_ids if job.kind == JobKind.SAMPLE else None,
    )


def is_large(new: NewJob) -> bool:
    """Whether the payload goes to the object store; loads are read by the housekeeper."""
    return len(new.payload) >= LARGE_PAYLOAD_BYTES and new.kind != JobKind.LOAD_WEIGHTS


async def _submit_large(services: Services, new: NewJob, prepare: PrepareJob | None) -> JobRecord:
    """Upload the payload, then store the job that names its place."""
    place = await run_in_thread(_upload_payload, services.storage, new.payload)
    stored = replace(new, payload=b"", payload_ref=place, payload_bytes=len(new.payload))
    try:
        job = await await_store_future(services.queue.submit(stored, prepare))
    except TinkexError as error:
        if not isinstance(error, StoreError):
            await run_in_thread(_discard_payload, services.storage, place)
        # After an error of the store the job may be stored; orphans are removed later.
        raise
    if job.payload_ref != place:
        # A repeated request: the first one has its own.
        await run_in_thread(_discard_payload, services.storage, place)
    return job


def _upload_payload(storage: FileStorage, payload: bytes) -> str:
    place = payload_place(payload)
    storage.cache.store.create_payload(place, payload)
    return place


def _discard_payload(storage: FileStorage, place: str) -> None:
    with suppress(BlobsUnavailable):
        storage.cache.store.remove(place)


async def submit_operation(
    services: Services,
    context: RequestContext[object],
    kind: JobKind,
    model_id: str,
    seq_id: int | None,
    *,
    payload: bytes | None = None,
    extra_prepare: PrepareOperation | None = None,
) -> types.UntypedAPIFuture:
    """Submit an operation on a model, ordered by its sequence number.

    The payload is the request's body unless another is given; `extra_prepare` runs in the same
    transaction, and raises InvalidInput if the model cannot do the operation.
    """
    new = _build_job(context, kind, model_id, seq_id)
    if payload is not None:
        new = replace(new, payload=payload, is_proto=False)
    prepare = _build_prepare(context, model_id, seq_id, extra_prepare)
    try:
        return await submit_job(services, new, prepare)
    except InvalidInput:
        await skip_sequence_number(services, context, kind, model_id, seq_id)
        raise


async def submit_pass(
    services: Services,
    context: RequestContext[object],
    kind: JobKind,
    model_id: str,
    seq_id: int | None,
    num_tokens: int,
) -> types.UntypedAPIFuture:
    """Submit a forward or forward_backward pass of `num_tokens` tokens."""
    new = replace(_build_job(context, kind, model_id, seq_id), num_tokens=num_tokens)
    return await submit_job(services, new, _build_prepare(context, model_id, seq_id))


async def skip_sequence_number(
    services: Services,
    context: RequestContext[object],
    kind: JobKind,
    model_id: str,
    seq_id: int | None,
) -> None:
    """Mark a rejected request's number as used, so that later operations do not wait for it."""
    if seq_id is None:
        return
    new = _build_job(context, kind, model_id, seq_id)
    new = replace(new, payload=b"", is_proto=False, is_cancelled=True)
    await submit_job(services, new, _build_prepare(context, model_id, seq_id))


def _build_job(
    context: RequestContext[object], kind: JobKind, model_id: str, seq_id: int | None
) -> NewJob:
    check_number("seq_id", seq_id)
    return NewJob(
        id="",
        tenant_id=context.tenant_id,
        session_id=parse_session_id(model_id),
        kind=kind,
        key=operation_key(context, model_id, seq_id),
        run_id=model_id,
        position=seq_id,
        payload=context.body,
        is_proto=context.is_proto,
    )


def _build_prepare(
    context: RequestContext[object],
    model_id: str,
    seq_id: int | None,
    extra_prepare: PrepareOperation | None = None,
) -> PrepareJob:
    """The checks in the transaction that stores an operation."""
    tenant_id = context.tenant_id

    def prepare(db: Connection) -> None:
        run = require_trainable_run(db, tenant_id, model_id)
        require_open_session(db, tenant_id, run.session_id)
        if seq_id is not None and seq_id <= run.forgotten_seq:
            raise PromiseExpiredError(
                f"operation {seq_id} of model {model_id!r} has finished and its result has "
                "expired; it is not run again"
            )
        if extra_prepare is not None:
            extra_prepare(db, run)

    return prepare


def operation_key(context: RequestContext[object], model_id: str, seq_id: int | None) -> str | None:
    """The deduplication key of an operation; None without a sequence number."""
    return None if seq_id is None else job_key("op", context.tenant_id, model_id, seq_id)


def job_key(kind: str, tenant_id: str, owner_id: str, number: int) -> str:
    """The deduplication key of a job; a repeated request has the same key.

    It includes the tenant, so that tenants cannot probe which numbers others have used.
    """
    return f"{kind}:{tenant_id}:{owner_id}:{number}"


def build_model_id(session_id: str, model_seq_id: int) -> str:
    """The id of a session's nth model; clients may compute it themselves."""
    return f"{session_id}:train:{model_seq_id}"


def build_sampler_id(session_id: str, seq_id: int) -> str:
    """The id of a session's nth sampling session."""
    return f"{session_id}:sample:{seq_id}"


def parse_session_id(owned_id: str) -> str:
    """The session id within the id of a model or sampling session."""
    return owned_id.rsplit(":", 2)[0]
