"""One sample from call to answer: submit, wait, and submit again if that may help."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

from tinkex import types
from tinkex.client.completions import CompletionPoller
from tinkex.client.future import APIFuture
from tinkex.client.holder import Holder
from tinkex.client.jobs import Promise, submit, wait
from tinkex.client.limiter import backoff_seconds
from tinkex.client.queue_state import QueueStateObserver
from tinkex.client.retry import RetryPolicy, is_away
from tinkex.client.sampling_retry import RetryConfig, wait_before_resubmit
from tinkex.client.timings import Timing
from tinkex.client.transport import outgoing
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

#: Each clone of a client numbers its samples in a block of its own.
BLOCK = 1_000_000_000
BYTES_PER_TOKEN = 10
#: Fields that older servers do not know: sent only when used.
NEW_FIELDS = {
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "prompt_logprobs_last_n": None,
    "record_stability_info": False,
}
_HEADERS = {"x-tinker-sampling-backpressure": "1"}
_CANCEL_POLICY = RetryPolicy(max_retries=2, outage_seconds=10.0)


def encode_sample(request: types.SampleRequest) -> bytes:
    """The request as JSON without its seq_id, which each submission puts in front."""
    fields = {
        name: getattr(request, name)
        for name in request.__struct_fields__
        if name != "seq_id" and getattr(request, name) is not None
    }
    for name, default in NEW_FIELDS.items():
        if name in fields and fields[name] == default:
            del fields[name]
    return encode_json(fields)


def with_seq_id(body: bytes, seq_id: int) -> bytes:
    """An encoded request with its number."""
    return b'{"seq_id":%d,%b' % (seq_id, body[1:])


class SampleRunner:
    """Runs the samples of one sampling session."""

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
        self._slots: asyncio.Semaphore | None = None
        self._completions: CompletionPoller | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._is_stubborn = retry_config.enable_retry_logic
        outage_seconds = holder.config.outage_seconds if self._is_stubborn else 0.0
        # Refusals are this file's business; only a server that is away is waited for below.
        self._policy = RetryPolicy(max_retries=0, outage_seconds=outage_seconds)
        limit_seconds = retry_config.progress_timeout
        self._watchdog = Watchdog(sampling_session_id, limit_seconds, self._is_watching)

    def start(self, request: types.SampleRequest, num_tokens: int) -> APIFuture[Any]:
        """Begin one sample; the body is encoded here, in the caller's thread."""
        return self._holder.start(self._run(encode_sample(request), BYTES_PER_TOKEN * num_tokens))

    async def _run(self, body: bytes, num_bytes: int) -> types.SampleResponse:
        called_at = time.monotonic()
        submit_seconds = 0.0
        is_ok = False
        try:
            await self._holder.session_id()
            async with self._in_flight(), self._watchdog.watching():
                response, submit_seconds = await self._try(body, num_bytes, called_at)
            is_ok = True
            return response
        finally:
            self._holder.finished(
                Timing(
                    operation="sample",
                    seconds=time.monotonic() - called_at,
                    submit_seconds=submit_seconds,
                    ok=is_ok,
                )
            )

    async def _try(
        self, body: bytes, num_bytes: int, called_at: float
    ) -> tuple[types.SampleResponse, float]:
        attempt = 0
        seq_id: int | None = None
        while True:
            attempt += 1
            if seq_id is None:
                seq_id = await self._next_seq_id()
            try:
                promise = await self._submit(with_seq_id(body, seq_id), num_bytes)
                response = await self._receive(promise)
            except TinkexError as error:
                wait_seconds = self._wait_after(error, attempt, called_at)
                # 429 is not a failure: the request says that it will come again.
                is_final = self._holder.flags.sample_no_retries and error.status != 429
                self._watchdog.note(error)
                if wait_seconds is None or is_final:
                    raise
                if isinstance(error, PromiseExpiredError | RequestFailedError):
                    # That submission is spent; the next one is a new one.
                    seq_id = None
                await asyncio.sleep(wait_seconds)
            else:
                self._watchdog.progress()
                return response, promise.submit_seconds

    def _is_watching(self) -> bool:
        flags = self._holder.flags
        return self._retry.enable_stuck_detection and flags.sample_enable_stuck_detection

    def _wait_after(self, error: TinkexError, attempt: int, called_at: float) -> float | None:
        config = self._holder.config
        if is_away(error):
            # Submitting and polling have waited for as long as an outage may last.
            return None
        stuck_seconds = self._watchdog.stuck_seconds(called_at)
        retry = replace(self._retry, enable_stuck_detection=self._is_watching())
        return wait_before_resubmit(
            retry, error, attempt, stuck_seconds, config.max_retries, random.random()
        )

    async def _submit(self, body: bytes, num_bytes: int) -> Promise:
        holder = self._holder
        request = outgoing(SAMPLE, body, headers=_HEADERS)
        limiter = holder.lane.limiter
        async with holder.sample_slots, holder.lane.submission(num_bytes):
            started = limiter.now()
            try:
                pause = holder.transport.billing_pause_seconds if self._is_stubborn else 0.0
                policy = replace(self._policy, billing_pause_seconds=pause)
                promise = await submit(holder.transport, request, policy)
            except RateLimitError as error:
                limiter.set(backoff_seconds(num_bytes, error.retry_after_seconds))
                self._poller.watch.see_body(error.body)
                raise
            limiter.clear(started)
        self._watchdog.progress()
        return promise

    async def _receive(self, promise: Promise) -> types.SampleResponse:
        try:
            async with self._readiness(promise):
                response: types.SampleResponse = await wait(self._poller, promise)
        except asyncio.CancelledError:
            if promise.request_id:
                self._tell_cancelled(promise.request_id)
            raise
        return stamped(response, promise)

    def _readiness(self, promise: Promise) -> AbstractAsyncContextManager[None]:
        """Where the server offers it, one poll for all tells when a result can be fetched."""
        if promise.result is not None or not self._holder.flags.sample_use_retrieve_futures:
            return nullcontext()
        return self._completion_poller().fetching(promise.request_id)

    def _tell_cancelled(self, request_id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._cancel(request_id))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _cancel(self, request_id: str) -> None:
        """Tell the server, if it wants to know, that nobody waits for this any more."""
        try:
            if await self._holder.server.can_cancel():
                message = CancelFutureRequest(request_id=request_id)
                await self._holder.transport.call(CANCEL_FUTURE, message, policy=_CANCEL_POLICY)
        except TinkexError:
            # The server finds out by itself; the caller has left already.
            return

    def _in_flight(self) -> asyncio.Semaphore:
        if self._slots is None:
            flags = self._holder.flags
            is_free = flags.sample_use_retrieve_futures
            most = BLOCK if is_free else flags.sample_max_concurrent_requests
            self._slots = asyncio.Semaphore(min(most, self._retry.max_connections or most))
        return self._slots

    async def _next_seq_id(self) -> int:
        if self._seq_ids is None:
            async with self._join_lock:
                if self._seq_ids is None:
                    self._clone_id = await self._join()
                    self._seq_ids = itertools.count(self._clone_id * BLOCK)
        return next(self._seq_ids)

    async def _join(self) -> int:
        if not self._holder.flags.sample_join_sampling_session:
            return secrets.randbelow(BLOCK) + 1
        message = types.JoinSamplingSessionRequest(sampling_session_id=self._session_id)
        return (await self._holder.transport.call(JOIN_SAMPLING_SESSION, message)).client_counter

    def _completion_poller(self) -> CompletionPoller:
        if self._completions is None:
            target = types.SamplingSessionFuturesTarget(
                sampling_session_id=self._session_id, cloned_sampler_id=self._clone_id
            )
            self._completions = CompletionPoller(self._holder.transport, target)
        return self._completions


def stamped(response: types.SampleResponse, promise: Promise) -> types.SampleResponse:
    """Give each sequence the id the server fixed when it took the request."""
    count = len(response.sequences)
    ids = promise.sequence_ids
    if ids is None:
        # Older servers name no sequences; theirs are named after the request.
        ids = [f"{promise.request_id}:{index}" for index in range(count)]
    if len(ids) != count:
        raise APIResponseValidationError(
            None, None, f"The server promised {len(ids)} sequences and returned {count}"
        )
    sequences = [
        replace(sequence, sequence_id=sequence_id)
        for sequence, sequence_id in zip(response.sequences, ids, strict=True)
    ]
    return replace(response, sequences=sequences)
