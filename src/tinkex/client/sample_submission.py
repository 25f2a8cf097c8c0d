"""Submit samples and wait for their results; resubmit after retryable failures."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import TypeAlias

from tinkex import types
from tinkex.client.batched_polling import CompletionPoller
from tinkex.client.future import APIFuture
from tinkex.client.holder import Holder
from tinkex.client.metrics import Timing
from tinkex.client.polling import SubmittedJob
from tinkex.client.queue_state import QueueStateObserver
from tinkex.client.rate_limits import rate_limit_backoff
from tinkex.client.retry import (
    RetryConfig,
    RetryPolicy,
    is_unreachable,
    wait_before_resubmit,
)
from tinkex.client.submission import submit_job
from tinkex.client.watchdog import Watchdog
from tinkex.errors import (
    APIResponseValidationError,
    PromiseExpiredError,
    RateLimitError,
    RequestFailedError,
    TinkexError,
)
from tinkex.wire.codec import encode_json
from tinkex.wire.endpoints import CANCEL_FUTURE, JOIN_SAMPLING_SESSION, SAMPLE
from tinkex.wire.messages import CancelFutureRequest

SampleJob: TypeAlias = SubmittedJob[types.SampleResponse]

#: Each clone of a client takes its seq ids from a separate block.
SEQ_ID_BLOCK = 1_000_000_000
PROMPT_BYTES_PER_TOKEN = 10
#: Fields unknown to older servers, with their defaults: sent only when set.
OPTIONAL_FIELDS = {
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "prompt_logprobs_last_n": None,
    "record_stability_info": False,
}
_SAMPLE_HEADERS = {"x-tinker-sampling-backpressure": "1"}
_CANCEL_POLICY = RetryPolicy(max_retries=2, outage_seconds=10.0)


def encode_sample(request: types.SampleRequest) -> bytes:
    """Encode a request as JSON without seq_id, which with_seq_id() adds for each submission."""
    fields = {
        name: getattr(request, name)
        for name in request.__struct_fields__
        if name != "seq_id" and getattr(request, name) is not None
    }
    for name, default in OPTIONAL_FIELDS.items():
        if name in fields and fields[name] == default:
            del fields[name]
    return encode_json(fields)


def with_seq_id(body: bytes, seq_id: int) -> bytes:
    """Add a seq_id to an encoded request."""
    return b'{"seq_id":%d,%b' % (seq_id, body[1:])


class SampleSubmitter:
    """Submits the samples of one sampling session."""

    def __init__(
        self,
        holder: Holder,
        sampling_session_id: str,
        retry_config: RetryConfig,
        observer: QueueStateObserver,
        is_clone: bool,
    ) -> None:
        self._holder = holder
        self._session_id = sampling_session_id
        self._retry = retry_config
        self._poller = holder.poller(observer, sampling_session_id)
        self._seq_ids: itertools.count[int] | None = None if is_clone else itertools.count()
        self._clone_id = 0
        self._join_lock = asyncio.Lock()
        self._concurrency: asyncio.Semaphore | None = None
        self._completions: CompletionPoller | None = None
        self._cancel_tasks: set[asyncio.Task[None]] = set()
        self._has_retries = retry_config.enable_retry_logic
        outage_seconds = holder.config.outage_seconds if self._has_retries else 0.0
        # Rejections are retried by this class; the transport waits for an unreachable server.
        self._policy = RetryPolicy(max_retries=0, outage_seconds=outage_seconds)
        limit_seconds = retry_config.progress_timeout
        self._watchdog = Watchdog(
            sampling_session_id, limit_seconds, self._is_stuck_detection_enabled
        )

    def start(
        self, request: types.SampleRequest, num_tokens: int
    ) -> APIFuture[types.SampleResponse]:
        """Start one sample; the body is encoded here, in the caller's thread."""
        return self._holder.start(
            self._run(encode_sample(request), PROMPT_BYTES_PER_TOKEN * num_tokens)
        )

    async def _run(self, body: bytes, num_bytes: int) -> types.SampleResponse:
        called_at = time.monotonic()
        submit_seconds = 0.0
        is_ok = False
        try:
            await self._holder.session_id()
            async with self._concurrency_limit(), self._watchdog.guard():
                response, submit_seconds = await self._run_with_retries(body, num_bytes, called_at)
            is_ok = True
            return response
        finally:
            self._holder.record_timing(
                Timing(
                    operation="sample",
                    seconds=time.monotonic() - called_at,
                    submit_seconds=submit_seconds,
                    ok=is_ok,
                )
            )

    async def _run_with_retries(
        self, body: bytes, num_bytes: int, called_at: float
    ) -> tuple[types.SampleResponse, float]:
        attempt = 0
        seq_id: int | None = None
        while True:
            attempt += 1
            if seq_id is None:
                seq_id = await self._next_seq_id()
            try:
                job = await self._submit(with_seq_id(body, seq_id), num_bytes)
                response = await self._receive(job)
            except TinkexError as error:
                wait_seconds = self._wait_after(error, attempt, called_at)
                # 429 is not a failure: the request headers announce resubmission on backpressure.
                is_final = self._holder.flags.sample_no_retries and error.status != 429
                self._watchdog.record_error(error)
                if wait_seconds is None or is_final:
                    raise
                if isinstance(error, PromiseExpiredError | RequestFailedError):
                    # The server ran this submission: the next one needs a new seq id.
                    seq_id = None
                await asyncio.sleep(wait_seconds)
            else:
                self._watchdog.record_progress()
                return response, job.submit_seconds

    def _is_stuck_detection_enabled(self) -> bool:
        flags = self._holder.flags
        return self._retry.enable_stuck_detection and flags.sample_enable_stuck_detection

    def _wait_after(self, error: TinkexError, attempt: int, called_at: float) -> float | None:
        config = self._holder.config
        if is_unreachable(error):
            # Submitting and polling have already waited for `outage_seconds`.
            return None
        stuck_seconds = self._watchdog.stuck_seconds(called_at)
        retry = replace(self._retry, enable_stuck_detection=self._is_stuck_detection_enabled())
        return wait_before_resubmit(
            retry, error, attempt, stuck_seconds, config.max_retries, random.random()
        )

    async def _submit(self, body: bytes, num_bytes: int) -> SampleJob:
        holder = self._holder
        limiter = holder.sampling_limits.limiter
        async with holder.sample_slots, holder.sampling_limits.acquire(num_bytes):
            started = limiter.now()
            try:
                pause = holder.transport.billing_pause_seconds if self._has_retries else 0.0
                policy = replace(self._policy, billing_pause_seconds=pause)
                job = await self._send(body, policy)
            except RateLimitError as error:
                limiter.back_off(rate_limit_backoff(num_bytes, error.retry_after_seconds))
                self._poller.queue_notifier.update_from_body(error.body)
                raise
            limiter.end_backoff(started)
        self._watchdog.record_progress()
        return job

    async def _send(self, body: bytes, policy: RetryPolicy) -> SampleJob:
        submission = asyncio.create_task(
            submit_job(self._holder.transport, SAMPLE, body, headers=_SAMPLE_HEADERS, policy=policy)
        )
        try:
            return await asyncio.shield(submission)
        except asyncio.CancelledError:
            # The server may have the request already; only its response has the id to cancel.
            self._start_cancel(self._cancel_submission(submission))
            raise

    async def _receive(self, job: SampleJob) -> types.SampleResponse:
        try:
            async with self._ready_scope(job):
                response = await self._poller.wait(job)
        except asyncio.CancelledError:
            self._start_cancel(self._cancel_job(job))
            raise
        return with_sequence_ids(response, job)

    def _ready_scope(self, job: SampleJob) -> AbstractAsyncContextManager[None]:
        """Wait for the batched poll, on servers that support it, before fetching a result."""
        if job.result is not None or not self._holder.flags.sample_use_retrieve_futures:
            return nullcontext()
        return self._completion_poller().fetch_scope(job.request_id)

    def _start_cancel(self, cancel: Coroutine[object, None, None]) -> None:
        task = asyncio.create_task(cancel)
        self._cancel_tasks.add(task)
        task.add_done_callback(self._cancel_tasks.discard)

    async def _cancel_submission(self, submission: asyncio.Task[SampleJob]) -> None:
        """Wait for the response of a submission, then cancel its job."""
        try:
            if await self._holder.server.can_cancel():
                async with asyncio.timeout(_CANCEL_POLICY.outage_seconds):
                    await self._cancel_job(await submission)
        except (TinkexError, TimeoutError):
            return
        finally:
            submission.cancel()

    async def _cancel_job(self, job: SampleJob) -> None:
        """Cancel a sample on the server, if the server supports it."""
        try:
            if job.request_id and await self._holder.server.can_cancel():
                message = CancelFutureRequest(request_id=job.request_id)
                await self._holder.transport.call(CANCEL_FUTURE, message, policy=_CANCEL_POLICY)
        except TinkexError:
            # Best effort: an abandoned sample only wastes server time.
            return

    def _concurrency_limit(self) -> asyncio.Semaphore:
        if self._concurrency is None:
            flags = self._holder.flags
            # With batched polling a waiting sample holds no connection.
            is_unlimited = flags.sample_use_retrieve_futures
            limit = SEQ_ID_BLOCK if is_unlimited else flags.sample_max_concurrent_requests
            self._concurrency = asyncio.Semaphore(min(limit, self._retry.max_connections or limit))
        return self._concurrency

    async def _next_seq_id(self) -> int:
        if self._seq_ids is None:
            async with self._join_lock:
                if self._seq_ids is None:
                    self._clone_id = await self._join_session()
                    self._seq_ids = itertools.count(self._clone_id * SEQ_ID_BLOCK)
        return next(self._seq_ids)

    async def _join_session(self) -> int:
        if not self._holder.flags.sample_join_sampling_session:
            return secrets.randbelow(SEQ_ID_BLOCK) + 1
        message = types.JoinSamplingSessionRequest(sampling_session_id=self._session_id)
        return (await self._holder.transport.call(JOIN_SAMPLING_SESSION, message)).client_counter

    def _completion_poller(self) -> CompletionPoller:
        if self._completions is None:
            target = types.SamplingSessionFuturesTarget(
                sampling_session_id=self._session_id, cloned_sampler_id=self._clone_id
            )
            self._completions = CompletionPoller(self._holder.transport, target)
        return self._completions


def with_sequence_ids(response: types.SampleResponse, job: SampleJob) -> types.SampleResponse:
    """Set the sequence ids that the server assigned when it accepted the request."""
    num_sequences = len(response.sequences)
    ids = job.sequence_ids
    if ids is None:
        # Older servers assign no ids: derive them from the request id.
        ids = [f"{job.request_id}:{index}" for index in range(num_sequences)]
    if len(ids) != num_sequences:
        raise APIResponseValidationError(
            None, None, f"The server announced {len(ids)} sequences but returned {num_sequences}"
        )
    sequences = [
        replace(sequence, sequence_id=sequence_id)
        for sequence, sequence_id in zip(response.sequences, ids, strict=True)
    ]
    return replace(response, sequences=sequences)
