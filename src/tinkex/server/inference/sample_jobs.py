"""Samples of the inference endpoints: submit a job, follow its tokens, read its result."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from tinkex import types
from tinkex.engine.grammar_schemas import build_grammar
from tinkex.engine.inference_request import InferenceParams, InferenceRequest
from tinkex.engine.protocol import SampleProgress
from tinkex.errors import (
    InvalidInput,
    PromiseExpiredError,
    RequestErrorCategory,
    RequestFailedError,
)
from tinkex.jobs.job_types import JobKind, encode_inference_payload
from tinkex.jobs.queue import PrepareJob
from tinkex.server.http.request_context import CallerIdentity, Services, run_in_thread
from tinkex.server.http.store_access import record_event
from tinkex.server.http.submission import submit_job
from tinkex.server.inference.chat_request import SamplingSettings
from tinkex.server.inference.error_bodies import InferenceError, context_exceeded, invalid_value
from tinkex.server.inference.model_names import ModelSource
from tinkex.store import jobs as job_store
from tinkex.store.database import Connection
from tinkex.store.records import JobState, NewJob
from tinkex.wire.proto import decode_sample_response

#: Seeds that the server chooses, so that a sample that runs again repeats its tokens.
_SEED_BITS = 62
RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """What a sample reports besides its tokens, and how it is identified."""

    has_prompt_logprobs: bool = False
    num_top_prompt_logprobs: int = 0
    prompt_field: str = "messages"
    """The field that errors about the prompt name."""
    idempotency_key: str = ""
    """The same request with the same key has the result of the first one."""
    user: str | None = None
    """The end user, for the audit log."""


class SampleJob:
    """A submitted sample."""

    def __init__(
        self,
        services: Services,
        caller: CallerIdentity,
        job_id: str,
        *,
        is_kept: bool = False,
    ) -> None:
        """`is_kept` lets the job finish without its client, which may ask again."""
        self.id = job_id
        self._services = services
        self._caller = caller
        self._is_kept = is_kept
        self.response: types.SampleResponse | None = None
        """The stored result, when it is known."""
        self._is_closed = False
        self._ends_at = time.monotonic() + services.config.inference_seconds

    async def follow(self, *, is_live: bool = True) -> AsyncGenerator[SampleProgress, None]:
        """Yield the tokens of all sequences, in parts: as they are generated if `is_live`.

        Raises the error of a failed sample. Everything that was yielded is part of the stored
        result.
        """
        seconds = self._ends_at - time.monotonic()
        stream = self._services.token_streams.follow(self.id, seconds)
        if is_live:
            async with aclosing(aiter(stream)) as live:
                async for progress in live:
                    yield progress
        response = await self.result()
        for progress in stream.rest(response.sequences):
            yield progress

    async def result(self) -> types.SampleResponse:
        """Wait for the stored result; raises the error of a failed sample, 504 after the limit."""
        if self.response is not None:
            return self.response
        with self._services.waiters.subscribe(self.id) as waiter:
            outcome = await self._load()
            while not outcome.job.is_finished:
                if self._services.waiters.is_closing:
                    raise InferenceError(
                        "the server stops; send the request again",
                        status=503,
                        retry_after_seconds=RETRY_SECONDS,
                    )
                seconds = self._ends_at - time.monotonic()
                if seconds <= 0:
                    raise InferenceError(
                        f"no answer within {self._services.config.inference_seconds:g} s; ask for "
                        "fewer tokens, or stream the answer",
                        status=504,
                    )
                await waiter.wait(seconds)
                outcome = await self._load()
        self._is_closed = True
        self.response = await _read_response(self._services, outcome)
        return self.response

    async def _load(self) -> job_store.JobWithResult:
        tenant_id = self._caller.tenant_id
        async with self._services.tenant_slots.semaphore_for(tenant_id):
            return await run_in_thread(self._services.queue.find_with_result, tenant_id, self.id)

    def close(self) -> None:
        """Cancel the sample, without waiting for it, unless it has finished or is kept."""
        if self._is_closed or self._is_kept:
            return
        self._is_closed = True
        self._services.token_streams.observer.count_cancelled()
        self._services.queue.cancel(self._caller.tenant_id, self.id).add_done_callback(
            lambda done: done.exception()
        )


async def _read_response(
    services: Services, outcome: job_store.JobWithResult
) -> types.SampleResponse:
    job, result = outcome
    services.cache.fetched_job_ids.add(job.id)
    if job.state == JobState.FAILED:
        category = RequestErrorCategory.parse(job.category)
        raise RequestFailedError(job.error or "the sample failed", job.id, category)
    if result is None:
        raise PromiseExpiredError(f"the result of request {job.id!r} has expired; send it again")
    return await run_in_thread(decode_sample_response, result)


async def submit_sample(
    services: Services,
    caller: CallerIdentity,
    source: ModelSource,
    prompt: Sequence[int],
    settings: SamplingSettings,
    options: SampleOptions,
) -> SampleJob:
    """Store the job of a sample; the caller cancels it when its client is gone."""
    max_tokens = _allowed_tokens(services, source, len(prompt), settings.max_tokens, options)
    grammar = await _check_schema(services, caller, settings)
    request = _build_request(source, prompt, settings, options, max_tokens, grammar)
    payload = encode_inference_payload(request)
    new = NewJob(
        id="",
        tenant_id=caller.tenant_id,
        session_id="",
        kind=JobKind.SAMPLE,
        key=_job_key(caller, options, payload),
        position=0,
        payload=payload,
        num_sequences=settings.num_choices,
        num_tokens=len(prompt) + settings.num_choices * max_tokens,
        base_model=source.base.name,
        # A client that gave a key may ask for the result again, also after a restart.
        process_id=None if options.idempotency_key else services.process_id,
    )

    def prepare(db: Connection) -> None:
        source.check_readable(db, caller.tenant_id)
        if options.user:
            record_event(db, caller, "inference_request", model=source.requested, user=options.user)

    submitted = asyncio.ensure_future(_submit_in_slot(services, new, prepare))
    try:
        future = await asyncio.shield(submitted)
    except asyncio.CancelledError:
        if not options.idempotency_key:
            submitted.add_done_callback(lambda done: _cancel_submitted(services, caller, done))
        raise
    return SampleJob(
        services,
        caller,
        future.request_id,
        is_kept=bool(options.idempotency_key),
    )


async def _check_schema(
    services: Services, caller: CallerIdentity, settings: SamplingSettings
) -> str | None:
    """The grammar of an answer; raises if its schema cannot be used."""
    schema = settings.grammar
    if schema is None:
        return None
    try:
        return await services.schema_threads.run(caller.tenant_id, lambda: build_grammar(schema))
    except InvalidInput as error:
        raise invalid_value("response_format", error.message) from error


async def _submit_in_slot(
    services: Services, new: NewJob, prepare: PrepareJob
) -> types.UntypedAPIFuture:
    async with services.tenant_slots.semaphore_for(new.tenant_id):
        return await submit_job(services, new, prepare)


def _cancel_submitted(
    services: Services,
    caller: CallerIdentity,
    submitted: asyncio.Future[types.UntypedAPIFuture],
) -> None:
    """Cancel a job whose client was gone before it was stored."""
    if not submitted.cancelled() and submitted.exception() is None:
        SampleJob(services, caller, submitted.result().request_id).close()


def _allowed_tokens(
    services: Services,
    source: ModelSource,
    num_prompt: int,
    max_tokens: int | None,
    options: SampleOptions,
) -> int:
    """Return how many tokens an answer may have; raises if the prompt leaves none."""
    context = source.base.max_context_tokens
    if num_prompt >= context:
        raise context_exceeded(num_prompt, context, options.prompt_field)
    limit = services.config.inference_max_tokens or context
    return min(context - num_prompt, limit, max_tokens if max_tokens is not None else context)


def _build_request(
    source: ModelSource,
    prompt: Sequence[int],
    settings: SamplingSettings,
    options: SampleOptions,
    max_tokens: int,
    grammar: str | None,
) -> InferenceRequest:
    return InferenceRequest(
        num_samples=settings.num_choices,
        prompt=types.ModelInput.from_ints(list(prompt)),
        sampling_params=InferenceParams(
            max_tokens=max(max_tokens, 1),
            is_prompt_only=max_tokens == 0,
            seed=_choose_seed(options) if settings.seed is None else settings.seed,
            stop=[] if settings.ignores_eos else None,
            stop_texts=settings.stop,
            stop_token_ids=settings.stop_token_ids,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            grammar=grammar,
        ),
        base_model=source.base.name if source.path is None else None,
        model_path=str(source.path) if source.path is not None else None,
        prompt_logprobs=options.has_prompt_logprobs or None,
        topk_prompt_logprobs=options.num_top_prompt_logprobs,
        topk_sample_logprobs=settings.num_top_logprobs,
    )


def _choose_seed(options: SampleOptions) -> int:
    """A random seed; that of a repeated request is the same."""
    if not options.idempotency_key:
        return secrets.randbits(_SEED_BITS)
    digest = hashlib.sha256(options.idempotency_key.encode()).digest()
    return int.from_bytes(digest) % (1 << _SEED_BITS)


def _job_key(caller: CallerIdentity, options: SampleOptions, payload: bytes) -> str | None:
    """The key of a job; another request with the same idempotency key has another one."""
    key = options.idempotency_key
    digest = hashlib.sha256(payload).hexdigest()
    return f"inference:{caller.tenant_id}:{key}:{digest}" if key else None
