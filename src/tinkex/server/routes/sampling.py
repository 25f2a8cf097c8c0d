"""Sampling sessions and samples."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from tinkex import clock, types
from tinkex.errors import BadRequestError, UnprocessableEntityError
from tinkex.ids import parse_tinker_path
from tinkex.jobs.kinds import JobKind
from tinkex.server.access import readers_of
from tinkex.server.admission import check_sample, model_of
from tinkex.server.base_models import check_sampleable, find_model, served_models
from tinkex.server.call import Call, Handler, Services
from tinkex.server.checks import check_number
from tinkex.server.operations import TOUCH_SECONDS, key_of, sampler_id_of, session_id_in, submit
from tinkex.server.ownership import open_session_of, readable_checkpoint, sampler_of, session_of
from tinkex.server.transactions import read, write
from tinkex.store import samplers
from tinkex.store.database import Connection
from tinkex.store.records import NewJob, SamplerRecord

MAX_SAMPLES = 1024


class _Source(NamedTuple):
    """What is sampled from."""

    base_model: str
    checkpoint_id: str | None = None


async def create_sampling_session(
    services: Services, call: Call[types.CreateSamplingSessionRequest]
) -> types.CreateSamplingSessionResponse:
    """Open a sampling session; the same number in the same session is the same one."""
    request, tenant_id = call.request, call.tenant_id
    check_number("sampling_session_seq_id", request.sampling_session_seq_id)
    sampler_id = sampler_id_of(request.session_id, request.sampling_session_seq_id)
    readers = await readers_of(services, call)

    def enter(db: Connection) -> None:
        session_of(db, tenant_id, request.session_id)
        if samplers.find(db, sampler_id) is not None:
            return
        open_session_of(db, tenant_id, request.session_id)
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

    await write(services, enter)
    return types.CreateSamplingSessionResponse(sampling_session_id=sampler_id)


def _find_source(
    db: Connection,
    readers: Collection[str],
    request: types.CreateSamplingSessionRequest | types.SampleRequest,
) -> _Source:
    if request.model_path is None:
        if request.base_model is None:
            raise UnprocessableEntityError(f"{request.type} needs base_model or model_path")
        return _Source(check_sampleable(db, request.base_model).name)
    path = parse_tinker_path(request.model_path)
    found = readable_checkpoint(db, readers, path, clock.now())
    if found.segment == "external_weights":
        raise BadRequestError(f"{path} is for other tools; sample from weights or sampler_weights")
    if request.base_model is not None and request.base_model != found.base_model:
        raise BadRequestError(
            f"{path} is of {found.base_model}, not of {request.base_model!r:.200}"
        )
    return _Source(check_sampleable(db, found.base_model).name, found.id)


async def join_sampling_session(
    services: Services, call: Call[types.JoinSamplingSessionRequest]
) -> types.JoinSamplingSessionResponse:
    """Give another client of a sampling session its own number."""
    sampler_id = call.request.sampling_session_id

    def enter(db: Connection) -> int:
        sampler_of(db, call.tenant_id, sampler_id)
        return samplers.add_clone(db, sampler_id)

    return types.JoinSamplingSessionResponse(client_counter=await write(services, enter))


async def get_sampler(services: Services, call: Call[Any]) -> types.GetSamplerResponse:
    """Say what a sampling session samples from."""
    sampler_id = call.ids["sampler_id"]

    def look(db: Connection) -> types.GetSamplerResponse:
        found = sampler_of(db, call.tenant_id, sampler_id)
        base = find_model(served_models(db), found.base_model)
        return types.GetSamplerResponse(
            sampler_id=found.id,
            base_model=found.base_model,
            model_path=found.model_path,
            tokenizer_id=(base.tokenizer_id if base is not None else None) or found.base_model,
        )

    return await read(services, look)


async def sample(services: Services, call: Call[types.SampleRequest]) -> types.UntypedAPIFuture:
    """Promise samples; the same number in the same sampling session is the same promise."""
    request, tenant_id = call.request, call.tenant_id
    _check(request)
    sampler_id = request.sampling_session_id
    readers = await readers_of(services, call)

    def prepare(db: Connection) -> str:
        if sampler_id is None:
            return _find_source(db, readers, request).base_model
        sampler = sampler_of(db, tenant_id, sampler_id)
        open_session_of(db, tenant_id, sampler.session_id)
        return sampler.base_model

    source = sampler_id or request.model_path or request.base_model or ""
    model = await model_of(services, (tenant_id, source), prepare)
    num_tokens = await check_sample(request, model)

    def store(db: Connection) -> None:
        prepare(db)
        if sampler_id is not None:
            samplers.touch(db, sampler_id, clock.now(), TOUCH_SECONDS)

    new = NewJob(
        id="",
        tenant_id=tenant_id,
        session_id=session_id_in(sampler_id or ""),
        kind=JobKind.SAMPLE,
        key=_key(call),
        sampler_id=sampler_id,
        position=request.seq_id or 0,
        payload=call.body,
        num_sequences=request.num_samples,
        num_tokens=num_tokens,
        base_model=model.name if model is not None and sampler_id is None else None,
    )
    return await submit(services, new, store)


def _key(call: Call[types.SampleRequest]) -> str | None:
    sampler_id, seq_id = call.request.sampling_session_id, call.request.seq_id
    if sampler_id is None or seq_id is None:
        return None
    return key_of("sample", call.tenant_id, sampler_id, seq_id)


def _check(request: types.SampleRequest) -> None:
    """Refuse at once what no engine can do."""
    check_number("num_samples", request.num_samples, at_least=1, at_most=MAX_SAMPLES)
    check_number("seq_id", request.seq_id)
    check_number("topk_prompt_logprobs", request.topk_prompt_logprobs)
    check_number("topk_sample_logprobs", request.topk_sample_logprobs)
    check_number("prompt_alt_tokens_k", request.prompt_alt_tokens_k)
    check_number("prompt_logprobs_last_n", request.prompt_logprobs_last_n, at_least=1)


ROUTES: dict[str, Handler] = {
    "create_sampling_session": create_sampling_session,
    "join_sampling_session": join_sampling_session,
    "get_sampler": get_sampler,
    "asample": sample,
}
