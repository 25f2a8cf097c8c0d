"""Sampling endpoints: sampling sessions and samples."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tinkex import clock, types
from tinkex.errors import BadRequestError, UnprocessableEntityError
from tinkex.ids import parse_tinker_path
from tinkex.jobs.job_types import JobKind
from tinkex.server.http.model_specs import (
    find_base_model,
    find_model,
    list_served_models,
    require_sampleable_model,
)
from tinkex.server.http.ownership import (
    require_open_session,
    require_readable_checkpoint,
    require_sampler,
    require_session,
    resolve_readers,
)
from tinkex.server.http.request_context import Handler, RequestContext, Services
from tinkex.server.http.store_access import read, write
from tinkex.server.http.submission import (
    build_sampler_id,
    job_key,
    parse_session_id,
    submit_job,
)
from tinkex.server.http.validation import check_number, check_sample
from tinkex.store import samplers
from tinkex.store.database import Connection
from tinkex.store.records import NewJob, SamplerRecord
from tinkex.store.write_locks import SHARED

#: Resolution of a sampling session's last-used time; limits writes.
TOUCH_INTERVAL_SECONDS = 1.0

MAX_SAMPLES = 1024


class _SampleSource(NamedTuple):
    """The base model and optional checkpoint to sample from."""

    base_model: str
    checkpoint_id: str | None = None


async def create_sampling_session(
    services: Services, context: RequestContext[types.CreateSamplingSessionRequest]
) -> types.CreateSamplingSessionResponse:
    """Create a sampling session; idempotent for the same session and number."""
    request, tenant_id = context.request, context.tenant_id
    check_number("sampling_session_seq_id", request.sampling_session_seq_id)
    sampler_id = build_sampler_id(request.session_id, request.sampling_session_seq_id)
    readers = await resolve_readers(services, context)

    def transaction(db: Connection) -> None:
        require_session(db, tenant_id, request.session_id)
        if samplers.find(db, sampler_id) is not None:
            return
        require_open_session(db, tenant_id, request.session_id)
        source = _find_source(db, readers, request)
        samplers.insert(
            db,
            SamplerRecord(
                id=sampler_id,
                tenant_id=tenant_id,
                session_id=request.session_id,
                base_model=source.base_model,
                model_path=request.model_path,
                checkpoint_id=source.checkpoint_id,
                created_at=clock.now(),
            ),
        )

    await write(services, transaction, SHARED)
    return types.CreateSamplingSessionResponse(sampling_session_id=sampler_id)


def _find_source(
    db: Connection,
    readers: Collection[str],
    request: types.CreateSamplingSessionRequest | types.SampleRequest,
) -> _SampleSource:
    if request.model_path is None:
        if request.base_model is None:
            raise UnprocessableEntityError(f"{request.type} needs base_model or model_path")
        return _SampleSource(require_sampleable_model(db, request.base_model).name)
    path = parse_tinker_path(request.model_path)
    checkpoint = require_readable_checkpoint(db, readers, path, clock.now())
    base_model = checkpoint.base_model
    if checkpoint.segment == "external_weights":
        raise BadRequestError(f"{path} is for other tools; sample from weights or sampler_weights")
    if request.base_model is not None and request.base_model != base_model:
        raise BadRequestError(
            f"{path} belongs to base model {base_model}, not to {request.base_model!r:.200}"
        )
    return _SampleSource(require_sampleable_model(db, base_model).name, checkpoint.id)


async def join_sampling_session(
    services: Services, context: RequestContext[types.JoinSamplingSessionRequest]
) -> types.JoinSamplingSessionResponse:
    """Assign a number to another client of a sampling session."""
    sampler_id = context.request.sampling_session_id

    def transaction(db: Connection) -> int:
        require_sampler(db, context.tenant_id, sampler_id)
        return samplers.add_clone(db, sampler_id)

    client_counter = await write(services, transaction, SHARED)
    return types.JoinSamplingSessionResponse(client_counter=client_counter)


async def get_sampler(
    services: Services, context: RequestContext[object]
) -> types.GetSamplerResponse:
    """Return the base model and checkpoint of a sampling session."""
    sampler_id = context.ids["sampler_id"]

    def query(db: Connection) -> types.GetSamplerResponse:
        sampler = require_sampler(db, context.tenant_id, sampler_id)
        base = find_model(list_served_models(db), sampler.base_model)
        return types.GetSamplerResponse(
            sampler_id=sampler.id,
            base_model=sampler.base_model,
            model_path=sampler.model_path,
            tokenizer_id=(base.tokenizer_id if base is not None else None) or sampler.base_model,
        )

    return await read(services, query)


async def sample(
    services: Services, context: RequestContext[types.SampleRequest]
) -> types.UntypedAPIFuture:
    """Submit a sample request; idempotent for the same sampling session and number."""
    request, tenant_id = context.request, context.tenant_id
    _check_request(request)
    sampler_id = request.sampling_session_id
    readers = await resolve_readers(services, context)

    def find_base(db: Connection) -> str:
        if sampler_id is None:
            return _find_source(db, readers, request).base_model
        sampler = require_sampler(db, tenant_id, sampler_id)
        require_open_session(db, tenant_id, sampler.session_id)
        return sampler.base_model

    source = sampler_id or request.model_path or request.base_model or ""
    model = await find_base_model(services, (tenant_id, source), find_base)
    num_tokens = await check_sample(request, model)

    def prepare(db: Connection) -> None:
        find_base(db)
        if sampler_id is not None:
            samplers.touch(db, sampler_id, clock.now(), TOUCH_INTERVAL_SECONDS)

    new = NewJob(
        id="",
        tenant_id=tenant_id,
        session_id=parse_session_id(sampler_id or ""),
        kind=JobKind.SAMPLE,
        key=_sample_key(context),
        sampler_id=sampler_id,
        position=request.seq_id or 0,
        payload=context.body,
        num_sequences=request.num_samples,
        num_tokens=num_tokens,
        base_model=model.name if model is not None else None,
    )
    return await submit_job(services, new, prepare)


def _sample_key(context: RequestContext[types.SampleRequest]) -> str | None:
    sampler_id, seq_id = context.request.sampling_session_id, context.request.seq_id
    if sampler_id is None or seq_id is None:
        return None
    return job_key("sample", context.tenant_id, sampler_id, seq_id)


def _check_request(request: types.SampleRequest) -> None:
    """Raise for values that no engine supports."""
    check_number("num_samples", request.num_samples, minimum=1, maximum=MAX_SAMPLES)
    check_number("seq_id", request.seq_id)
    check_number("topk_prompt_logprobs", request.topk_prompt_logprobs)
    check_number("topk_sample_logprobs", request.topk_sample_logprobs)
    check_number("prompt_alt_tokens_k", request.prompt_alt_tokens_k)
    check_number("prompt_logprobs_last_n", request.prompt_logprobs_last_n, minimum=1)


ROUTES: dict[str, Handler] = {
    "create_sampling_session": create_sampling_session,
    "join_sampling_session": join_sampling_session,
    "get_sampler": get_sampler,
    "asample": sample,
}
