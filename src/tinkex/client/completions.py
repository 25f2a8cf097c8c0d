"""One poll for all samples of a client, where the server offers it: which are ready?"""

from __future__ import annotations

import asyncio
import random

from tinkex import types
from tinkex.client.retry import NO_RETRY, RetryPolicy, wait_before_retry
from tinkex.client.transport import Transport
from tinkex.errors import TinkexError
from tinkex.wire.endpoints import RETRIEVE_FUTURES

_POLICY = RetryPolicy(first_wait_seconds=1.0, max_wait_seconds=10.0)


class CompletionPoller:
    """Asks while anybody waits; tells each waiter when its result is ready to be fetched."""

    def __init__(self, transport: Transport, target: types.SamplingSessionFuturesTarget) -> None:
        self._transport = transport
        self._target = target
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._early: set[str] = set()
        self._retrieved: set[str] = set()
        self._cursor = 0
        self._task: asyncio.Task[None] | None = None

    async def completed(self, request_id: str) -> None:
        """Return when the result, or the failure, of a request is ready to be fetched."""
        if request_id in self._early:
            self._early.discard(request_id)
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[request_id] = waiter
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._poll())
        try:
            await waiter
        finally:
            self._waiters.pop(request_id, None)
            self._retrieved.add(request_id)

    async def _poll(self) -> None:
        attempt = 0
        started = asyncio.get_running_loop().time()
        while self._waiters:
            acknowledged = sorted(self._retrieved)
            try:
                reply = await self._ask(acknowledged)
            except TinkexError as error:
                attempt += 1
                elapsed = asyncio.get_running_loop().time() - started
                wait = wait_before_retry(_POLICY, attempt, elapsed, error, random.random())
                if wait is None:
                    self._fail_all(error)
                    return
                await asyncio.sleep(wait)
            else:
                attempt, started = 0, asyncio.get_running_loop().time()
                self._retrieved.difference_update(acknowledged)
                self._take(reply)

    async def _ask(self, acknowledged: list[str]) -> types.FuturesRetrieveResponse:
        message = types.FuturesRetrieveRequest(
            target=self._target, prev_cursor=self._cursor, retrieved_request_ids=acknowledged
        )
        return await self._transport.call(RETRIEVE_FUTURES, message, policy=NO_RETRY)

    def _take(self, reply: types.FuturesRetrieveResponse) -> None:
        self._cursor = reply.cursor
        for completion in reply.completions:
            waiter = self._waiters.get(completion.request_id)
            if waiter is None:
                # Ready before its promise was read here.
                self._early.add(completion.request_id)
            elif not waiter.done():
                waiter.set_result(None)

    def _fail_all(self, error: TinkexError) -> None:
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(error)
