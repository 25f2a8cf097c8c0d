"""Batched polling: every waiter gets its completion or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tinkex.client.batched_polling import CompletionPoller
from tinkex.client.retry import NO_RETRY, RetryPolicy
from tinkex.errors import APIConnectionError, NotFoundError
from tinkex.types import (
    FutureCompletion,
    FutureFailed,
    FutureFinished,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    SamplingSessionFuturesTarget,
)
from tinkex.wire.endpoints import RETRIEVE_FUTURES, Endpoint

TARGET = SamplingSessionFuturesTarget(sampling_session_id="s:sample:0", cloned_sampler_id=3)


class Server:
    """Holds each poll until the test provides a response."""

    def __init__(self) -> None:
        self.requests: list[FuturesRetrieveRequest] = []
        self._answers: asyncio.Queue[FuturesRetrieveResponse | Exception] = asyncio.Queue()

    async def call(
        self, endpoint: Endpoint[Any, Any], message: FuturesRetrieveRequest, *, policy: RetryPolicy
    ) -> FuturesRetrieveResponse:
        # The poll loop retries; retries in two layers would multiply.
        assert (endpoint, policy) == (RETRIEVE_FUTURES, NO_RETRY)
        self.requests.append(message)
        answer = await self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def finish(self, *request_ids: str, cursor: int = 1) -> None:
        done: list[FutureCompletion] = [FutureFinished(request_id=name) for name in request_ids]
        self._answers.put_nowait(FuturesRetrieveResponse(completions=done, cursor=cursor))

    def answer(self, answer: FuturesRetrieveResponse | Exception) -> None:
        self._answers.put_nowait(answer)


Scenario = Callable[[Server, CompletionPoller], Coroutine[Any, Any, None]]


def run_scenario(scenario: Scenario) -> None:
    async def main() -> None:
        server = Server()
        transport: Any = server
        await asyncio.wait_for(scenario(server, CompletionPoller(transport, TARGET)), 5.0)

    asyncio.run(main())


async def fetch(poller: CompletionPoller, request_id: str) -> None:
    async with poller.fetch_scope(request_id):
        pass


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_each_waiter_gets_its_completion() -> None:
    @run_scenario
    async def _(server: Server, poller: CompletionPoller) -> None:
        first = asyncio.ensure_future(fetch(poller, "a"))
        second = asyncio.ensure_future(fetch(poller, "b"))
        await settle()
        assert server.requests[0].target == TARGET
        assert (server.requests[0].prev_cursor, server.requests[0].retrieved_request_ids) == (0, [])
        server.finish("b", cursor=7)
        await second
        assert not first.done()
        await settle()
        assert server.requests[1].prev_cursor == 7
        server.finish("a", cursor=9)
        await first


def test_failed_request_is_reported_as_ready() -> None:
    @run_scenario
    async def _(server: Server, poller: CompletionPoller) -> None:
        waiting = asyncio.ensure_future(fetch(poller, "a"))
        await settle()
        failed = FutureFailed(request_id="a")
        server.answer(FuturesRetrieveResponse(completions=[failed], cursor=1))
        await waiting


def test_single_poll_serves_all_waiters() -> None:
    @run_scenario
    async def _(server: Server, poller: CompletionPoller) -> None:
        names = [f"r{number}" for number in range(50)]
        waiting = [asyncio.ensure_future(fetch(poller, name)) for name in names]
        await settle()
        assert len(server.requests) == 1
        server.finish(*names)
        await asyncio.gather(*waiting)


def test_no_poll_without_waiters() -> None:
    @run_scenario
    async def _(server: Server, poller: CompletionPoller) -> None:
        waiting = asyncio.ensure_future(fetch(poller, "a"))
        await settle()
        server.finish("a", cursor=4)
        await waiting
        await settle()
        assert len(server.requests) == 1
        again = asyncio.ensure_future(fetch(poller, "b"))
        await settle()
        # It continues from the cursor and acknowledges results.
        assert (server.requests[1].prev_cursor, server.requests[1].retrieved_request_ids) == (
            4,
            ["a"],
        )
        server.finish("b", cursor=5)
        await again


def test_acknowledgements_are_repeated_until_a_poll_succeeds() -> None:
    @run_scenario
    async def _(server: Server, poller: CompletionPoller) -> None:
        waiting = [asyncio.ensure_future(fetch(poller, name)) for name in "abc"]
        await settle()
        server.finish("b", "a")
        await asyncio.gather(*waiting[:2])
        # A concurrent poll may already be sent; the one after it fails, and the next acknowledges.
        server.finish()
        server.answer(APIConnectionError())
        before = asyncio.get_running_loop().time()
        while len(server.requests) < 4:
            await asyncio.sleep(0.05)
        # No hot loop against an unreachable server.
        assert asyncio.get_running_loop().time() - before > 0.5
        acknowledged = [request.retrieved_request_ids for request in server.requests]
        assert acknowledged[-1] == ["a", "b"]
        assert acknowledged[0] == []
        server.finish("c")
        await waiting[2]


def test_completion_before_wait() -> None:
    @run_scenario
    async def _(server: Server, poller: CompletionPoller) -> None:
        waiting = asyncio.ensure_future(fetch(poller, "a"))
        await settle()
        server.finish("early", "a")
        await waiting
        # No response is needed for it.
        await fetch(poller, "early")


def test_final_error_reaches_all_waiters_and_next_waiter_polls_again() -> None:
    @run_scenario
    async def _(server: Server, poller: CompletionPoller) -> None:
        waiting = [asyncio.ensure_future(fetch(poller, name)) for name in "ab"]
        await settle()
        server.answer(NotFoundError("no such session"))
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [NotFoundError, NotFoundError]
        again = asyncio.ensure_future(fetch(poller, "a"))
        await settle()
        server.finish("a")
        await again


def test_cancelled_waiter_does_not_affect_others() -> None:
    @run_scenario
    async def _(server: Server, poller: CompletionPoller) -> None:
        leaving = asyncio.ensure_future(fetch(poller, "a"))
        staying = asyncio.ensure_future(fetch(poller, "b"))
        await settle()
        leaving.cancel()
        await settle()
        server.finish("a", "b")
        await staying
        assert leaving.cancelled()


def test_server_without_long_polling_is_polled_with_backoff() -> None:
    @run_scenario
    async def _(server: Server, poller: CompletionPoller) -> None:
        waiting = asyncio.ensure_future(fetch(poller, "a"))
        for _ in range(100):
            server.finish()
        await asyncio.sleep(0.05)
        waiting.cancel()
        assert len(server.requests) < 10


def test_unexpected_poll_error_reaches_waiters() -> None:
    @run_scenario
    async def _(server: Server, poller: CompletionPoller) -> None:
        waiting = asyncio.ensure_future(fetch(poller, "a"))
        await settle()
        server.answer(ZeroDivisionError("a bug of ours"))
        done, _ = await asyncio.wait([waiting], timeout=30.0)
        waiting.cancel()
        assert poller._task is not None
        assert isinstance(poller._task.exception(), ZeroDivisionError)
        assert done


def test_result_is_acknowledged_only_after_fetch() -> None:
    @run_scenario
    async def _(server: Server, poller: CompletionPoller) -> None:
        other = asyncio.ensure_future(fetch(poller, "b"))
        await settle()
        server.finish("a")
        await settle()
        async with poller.fetch_scope("a"):
            server.finish()
            while len(server.requests) < 3:
                await asyncio.sleep(0.05)
            assert [request.retrieved_request_ids for request in server.requests] == [[], [], []]
        server.finish()
        while len(server.requests) < 4:
            await asyncio.sleep(0.05)
        assert server.requests[3].retrieved_request_ids == ["a"]
        server.finish("b")
        await other
