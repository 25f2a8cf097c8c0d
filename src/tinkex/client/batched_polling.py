"""One long poll for all samples of a client, on servers that support it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tinkex import types
from tinkex.client.retry import (
    MIN_LONG_POLL_SECONDS,
    NO_RETRY,
    QUICK_POLL_BACKOFF,
    RetryPolicy,
    backoff,
    wait_before_retry,
)
from tinkex.client.transport import Transport
from tinkex.errors import APITimeoutError, ConnectTimeoutError, TinkexError
from tinkex.wire.endpoints import RETRIEVE_FUTURES

MAX_READY = 10_000
_POLICY = RetryPolicy(first_wait_seconds=1.0, max_wait_seconds=10.0)


class CompletionPoller:
    """Polls while there are waiters and wakes each one when its result is ready."""

    def __init__(self, transport: Transport, target: types.SamplingSessionFuturesTarget) -> None:
        self._transport = transport
        self._target = target
        self._waiters: dict[str, asyncio.Future[None]] = {}
        #: Ready but not fetched yet, oldest first.
        self._ready: dict[str, None] = {}
        self._retrieved: set[str] = set()
        self._cursor = 0
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def fetch_scope(self, request_id: str) -> AsyncIterator[None]:
        """Wait until a result, or a failure, is ready; fetch it inside the block.

        The result is acknowledged only after a successful or cancelled fetch: the server announces
        it once, and a failed fetch is retried.
        """
        await self.wait_ready(request_id)
        try:
            yield
        except asyncio.CancelledError:
            self._mark_retrieved(request_id)
            raise
        self._mark_retrieved(request_id)

    def _mark_retrieved(self, request_id: str) -> None:
        self._ready.pop(request_id, None)
        self._retrieved.add(request_id)

    async def wait_ready(self, request_id: str) -> None:
        """Wait until the result, or the failure, of a request is ready to be fetched."""
        if request_id in self._ready:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[request_id] = waiter
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._poll())
            self._task.add_done_callback(self._on_poll_done)
        try:
            await waiter
        except asyncio.CancelledError:
            self._retrieved.add(request_id)
            raise
        finally:
            self._waiters.pop(request_id, None)

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        attempt = num_quick = 0
        started = loop.time()
        while self._waiters:
            acknowledged, polled_at = sorted(self._retrieved), loop.time()
            try:
                reply = await self._request_completions(acknowledged)
            except TinkexError as error:
                attempt += 1
                elapsed = loop.time() - started
                wait = wait_before_retry(_POLICY, attempt, elapsed, error, random.random())
                if wait is None:
                    raise
                await asyncio.sleep(wait)
            else:
                attempt, started = 0, loop.time()
                self._retrieved.difference_update(acknowledged)
                has_news = self._handle_reply(reply)
                is_quick = not has_news and started - polled_at < MIN_LONG_POLL_SECONDS
                num_quick = num_quick + 1 if is_quick else 0
                if num_quick:
                    await asyncio.sleep(backoff(QUICK_POLL_BACKOFF, num_quick, random.random()))

    async def _request_completions(self, acknowledged: list[str]) -> types.FuturesRetrieveResponse:
        message = types.FuturesRetrieveRequest(
            target=self._target, prev_cursor=self._cursor, retrieved_request_ids=acknowledged
        )
        try:
            return await self._transport.call(RETRIEVE_FUTURES, message, policy=NO_RETRY)
        except ConnectTimeoutError:
            raise
        except APITimeoutError:
            # A poll that timed out is a long poll without news.
            return types.FuturesRetrieveResponse(completions=[], cursor=self._cursor)

    def _handle_reply(self, reply: types.FuturesRetrieveResponse) -> bool:
        self._cursor = reply.cursor
        for completion in reply.completions:
            if completion.request_id in self._retrieved:
                continue
            self._ready[completion.request_id] = None
            # Removed before it is woken, so that no poll is sent for waiters that are done.
            waiter = self._waiters.pop(completion.request_id, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        while len(self._ready) > MAX_READY:
            # Samples cancelled before their future was read: they are never fetched.
            self._ready.pop(next(iter(self._ready)))
        return bool(reply.completions)

    def _on_poll_done(self, task: asyncio.Task[None]) -> None:
        """Pass an error that ended the polling to all waiters."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        for waiter in self._waiters.values():
            if not waiter.done() and error is not None:
                waiter.set_exception(error)
