"""Future endpoints: retrieve results by long poll, one or many, and cancel samples."""

from __future__ import annotations

import time

import msgspec

from tinkex import clock, types
from tinkex.errors import PromiseExpiredError, RequestErrorCategory, UnprocessableEntityError
from tinkex.jobs import future_waiters
from tinkex.jobs.job_types import PROTO_RESULT_KINDS, JobKind
from tinkex.jobs.wakeup import ALIVE_SECONDS
from tinkex.server.http.ownership import require_sampler
from tinkex.server.http.request_context import (
    Handler,
    RawResponse,
    RequestContext,
    Services,
    run_in_thread,
)
from tinkex.server.http.store_access import await_store_future, read, write
from tinkex.server.http.validation import check_number
from tinkex.store import coordination, samplers
from tinkex.store import jobs as job_store
from tinkex.store.database import Connection
from tinkex.store.records import JobRecord, JobState
from tinkex.store.write_locks import SHARED
from tinkex.types import TensorData
from tinkex.wire.codec import encode_json
from tinkex.wire.messages import CancelFutureRequest
from tinkex.wire.proto import decode_forward_backward_output, decode_sample_response
from tinkex.wire.proto.json_compat import JSON_FIELDS
from tinkex.wire.results import make_error_body


def to_json_compat(kind: str, result: bytes) -> bytes:
    """Convert a protobuf result to the JSON that older clients read."""
    if kind == JobKind.SAMPLE:
        return msgspec.json.encode(_to_builtins(decode_sample_response(result)))
    return msgspec.json.encode(_to_builtins(decode_forward_backward_output(result)))


def _to_builtins(value: object) -> object:
    """Convert a value to builtins; msgspec encodes NaN and infinity as null."""
    if isinstance(value, TensorData):
        return value.to_wire()
    if isinstance(value, list):
        return [_to_builtins(item) for item in value]
    if isinstance(value, dict):
        return {name: _to_builtins(item) for name, item in value.items()}
    if type(value) not in JSON_FIELDS:
        return value
    items = {name: _to_builtins(getattr(value, name)) for name in JSON_FIELDS[type(value)]}
    return {name: item for name, item in items.items() if item is not None}


PROTOBUF_TYPE = "application/x-protobuf"
#: Completions per response; a client with more polls again at once.
MAX_COMPLETIONS = 1000
#: Ids that one request may report as retrieved: they become parameters of one SQL statement.
MAX_RETRIEVED = 30_000
#: Above this share of the tenant's job limit, the queue state is "paused_capacity".
LONG_QUEUE_SHARE = 0.5


# --- one future ----------------------------------------------------------------------------
async def retrieve_future(
    services: Services, context: RequestContext[types.FutureRetrieveRequest]
) -> RawResponse:
    """Return the result of a future; long-polls if it is not ready."""
    request_id = context.request.request_id
    with services.waiters.subscribe(request_id) as waiter:
        outcome = await _load_outcome(services, context.tenant_id, request_id)
        if not outcome.job.is_finished:
            await waiter.wait(services.config.long_poll_seconds)
            outcome = await _load_outcome(services, context.tenant_id, request_id)
    if not outcome.job.is_finished:
        return await _pending_response(services, outcome.job)
    return await _result_response(services, context, outcome)


async def _load_outcome(
    services: Services, tenant_id: str, request_id: str
) -> job_store.JobWithResult:
    async with services.tenant_slots.semaphore_for(tenant_id):
        return await run_in_thread(services.queue.find_with_result, tenant_id, request_id)


async def _pending_response(services: Services, job: JobRecord) -> RawResponse:
    reason = services.cache.pause_reasons.get(job.tenant_id)
    if reason is None:
        reason = await run_in_thread(_pause_reason, services, job.tenant_id)
        services.cache.pause_reasons.put(job.tenant_id, reason)
    body: dict[str, object] = {"request_id": job.id, "queue_state": "active"}
    if reason:
        body |= {"queue_state": "paused_capacity", "queue_state_reason": reason}
    return RawResponse(status=408, body=encode_json(body))


def _pause_reason(services: Services, tenant_id: str) -> str:
    """Why a tenant's jobs are paused; empty if they are not."""
    since = clock.now() - ALIVE_SECONDS
    max_jobs = services.config.max_jobs_per_tenant

    def query(db: Connection) -> str:
        if not coordination.list_alive_processes(db, "worker", since=since):
            return "no worker is running; queued jobs start when one does"
        num_jobs = job_store.get_load(db, tenant_id).num_jobs
        if num_jobs > max_jobs * LONG_QUEUE_SHARE:
            return f"{num_jobs} of your requests are waiting; the limit is {max_jobs}"
        return ""

    return services.database.read(query)


async def _result_response(
    services: Services,
    context: RequestContext[types.FutureRetrieveRequest],
    outcome: job_store.JobWithResult,
) -> RawResponse:
    job, result = outcome
    if job.state == JobState.FAILED:
        services.cache.fetched_job_ids.add(job.id)
        category = RequestErrorCategory.parse(job.category)
        return RawResponse(
            body=encode_json(make_error_body(job.error or "the job failed", category))
        )
    if result is None:
        raise PromiseExpiredError(
            f"the result of future {job.id!r} has expired; submit the request again"
        )
    if context.request.allow_metadata_only and len(result) > services.config.inline_result_bytes:
        size = {"status": "complete_metadata", "response_payload_size": len(result)}
        return RawResponse(body=encode_json(size))
    services.cache.fetched_job_ids.add(job.id)
    if job.kind not in PROTO_RESULT_KINDS:
        return RawResponse(body=result)
    if is_protobuf_accepted(context.headers.get("accept", "")):
        return RawResponse(body=result, content_type=PROTOBUF_TYPE)
    return RawResponse(body=await run_in_thread(to_json_compat, job.kind, result))


def is_protobuf_accepted(accept: str) -> bool:
    """Whether a client reads protobuf: its Accept header is empty or includes it."""
    return not accept or "protobuf" in accept


# --- many futures --------------------------------------------------------------------------
async def retrieve_futures(
    services: Services, context: RequestContext[types.FuturesRetrieveRequest]
) -> types.FuturesRetrieveResponse:
    """Return a sampling client's futures that finished since its last poll; long-polls."""
    request = context.request
    _check_retrieve_request(request)
    sampler_id, retrieved = request.target.sampling_session_id, request.retrieved_request_ids
    await read(services, lambda db: require_sampler(db, context.tenant_id, sampler_id))
    if retrieved:
        await write(
            services, lambda db: samplers.delete_completions(db, sampler_id, retrieved), SHARED
        )
    deadline = time.monotonic() + _poll_seconds(services, request)
    while True:
        with services.waiters.subscribe() as waiter:
            completions, cursor = await run_in_thread(_list_completions, services, request)
            seconds = deadline - time.monotonic()
            if completions or services.waiters.is_closing or seconds <= 0:
                return types.FuturesRetrieveResponse(completions=completions, cursor=cursor)
            # Wake-up messages can be lost, so the store is also polled.
            await waiter.wait(min(seconds, future_waiters.POLL_SECONDS))


def _check_retrieve_request(request: types.FuturesRetrieveRequest) -> None:
    check_number("prev_cursor", request.prev_cursor)
    check_number("cloned_sampler_id", request.target.cloned_sampler_id)
    num_ids = len(request.retrieved_request_ids)
    if num_ids > MAX_RETRIEVED:
        raise UnprocessableEntityError(
            f"retrieved_request_ids has {num_ids} ids; the limit is {MAX_RETRIEVED}"
        )


def _poll_seconds(services: Services, request: types.FuturesRetrieveRequest) -> float:
    seconds = services.config.long_poll_seconds
    return seconds if request.timeout is None else min(seconds, max(request.timeout, 0.0))


def _list_completions(
    services: Services, request: types.FuturesRetrieveRequest
) -> tuple[list[types.FutureCompletion], int]:
    target = request.target
    rows, cursor = services.database.read(
        lambda db: samplers.list_completions(
            db,
            target.sampling_session_id,
            target.cloned_sampler_id,
            request.prev_cursor,
            MAX_COMPLETIONS,
        )
    )
    return [_serialize_completion(job_id, size) for job_id, size in rows], cursor


def _serialize_completion(job_id: str, size: int | None) -> types.FutureCompletion:
    if size is None:
        return types.FutureFailed(request_id=job_id)
    return types.FutureFinished(request_id=job_id, response_payload_uncompressed_size=size)


async def cancel_future(
    services: Services, context: RequestContext[CancelFutureRequest]
) -> dict[str, object]:
    """Cancel a sample."""
    await await_store_future(services.queue.cancel(context.tenant_id, context.request.request_id))
    return {}


ROUTES: dict[str, Handler] = {
    "retrieve_future": retrieve_future,
    "retrieve_futures": retrieve_futures,
    "cancel_future": cancel_future,
}
