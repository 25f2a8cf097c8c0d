"""The road of one model: what was called first is sent first, whatever happens to anything."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

from tinkex.client.future import APIFuture
from tinkex.client.metrics import Timing
from tinkex.client.ordered_queue import FIRST_SEQ_ID, OrderedQueue
from tinkex.errors import ClientClosed, InvalidInput, RequestFailedError


class StubHolder:
    """As much of a Holder as a road needs."""

    def __init__(self) -> None:
        self.is_closed = False
        self.timings: list[Timing] = []

    def check_usable(self) -> None:
        if self.is_closed:
            raise ClientClosed("This client is closed")

    def task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)

    def finished(self, timing: Timing) -> None:
        self.timings.append(timing)


class RecordedQueue:
    """A road, and what was seen on it."""

    def __init__(self) -> None:
        self.holder = StubHolder()
        self.road = OrderedQueue(self.holder)  # type: ignore[arg-type]
        self.prepared: list[int] = []
        self.sent: list[int] = []

    def enter(
        self,
        num_requests: int = 1,
        send: Callable[[int], Awaitable[Any]] | None = None,
        receive: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> APIFuture[Any]:
        def prepare(first: int) -> Callable[[], Awaitable[Any]]:
            self.prepared.append(first)
            return lambda: self._send(first, send)

        async def give_back(sent: Any) -> Any:
            return sent

        return self.road.submit("optim_step", num_requests, prepare, receive or give_back)

    async def _send(self, first: int, send: Callable[[int], Awaitable[Any]] | None) -> Any:
        self.sent.append(first)
        await asyncio.sleep(0)
        return await send(first) if send is not None else first


@pytest.fixture
def recorded() -> RecordedQueue:
    return RecordedQueue()


async def never(_: Any) -> None:
    await asyncio.Event().wait()


async def broken(_: Any) -> None:
    raise RequestFailedError("refused")


# --- order --------------------------------------------------------------------------------


def test_calls_without_waiting_are_sent_in_order(recorded: RecordedQueue) -> None:
    futures = [recorded.enter() for _ in range(100)]
    assert [future.result(timeout=60) for future in futures] == list(range(1, 101))
    assert recorded.prepared == recorded.sent == list(range(FIRST_SEQ_ID, 101))


def test_a_call_of_several_requests_takes_several_ids(recorded: RecordedQueue) -> None:
    futures = [recorded.enter(count) for count in (3, 1, 2)]
    assert [future.result(timeout=60) for future in futures] == [1, 4, 5]
    assert recorded.enter().result(timeout=60) == 7


def test_many_threads_share_ids_without_a_gap_and_sends_follow_ids(recorded: RecordedQueue) -> None:
    start = threading.Barrier(8)

    def call(_: int) -> list[int]:
        start.wait()
        futures = [recorded.enter(1 + number % 3) for number in range(25)]
        return [future.result(timeout=60) for future in futures]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(8)))
    assert recorded.sent == recorded.prepared == sorted(recorded.prepared)
    # Each thread saw its own calls leave in its own order.
    assert all(mine == sorted(mine) for mine in results)
    assert sorted(first for mine in results for first in mine) == recorded.prepared
    last = recorded.enter().result(timeout=60)
    assert last == FIRST_SEQ_ID + 8 * sum(1 + number % 3 for number in range(25))


def test_ids_are_given_in_the_callers_thread(recorded: RecordedQueue) -> None:
    held = threading.Event()
    recorded.enter(send=lambda _: asyncio.to_thread(held.wait, 5))
    recorded.enter()
    assert recorded.prepared == [1, 2]
    held.set()


def test_the_next_is_sent_only_when_the_server_has_the_last(recorded: RecordedQueue) -> None:
    held, began = threading.Event(), threading.Event()

    async def slow(_: int) -> str:
        began.set()
        await asyncio.to_thread(held.wait, 5)
        return "taken"

    first, second = recorded.enter(send=slow), recorded.enter()
    assert began.wait(60)
    assert recorded.sent == [1]
    assert not second.done()
    held.set()
    assert (first.result(timeout=60), second.result(timeout=60)) == ("taken", 2)


def test_results_are_awaited_side_by_side(recorded: RecordedQueue) -> None:
    first = recorded.enter(receive=never)
    assert recorded.enter().result(timeout=60) == 2
    assert not first.done()
    first.cancel()


# --- trouble ------------------------------------------------------------------------------


def test_a_refusal_while_preparing_uses_no_id_and_sends_nothing(recorded: RecordedQueue) -> None:
    def refuse(first: int) -> Callable[[], Awaitable[Any]]:
        raise InvalidInput(f"not with {first}")

    assert recorded.enter().result(timeout=60) == 1
    with pytest.raises(InvalidInput, match="not with 2"):
        recorded.road.submit("optim_step", 3, refuse, never)
    assert recorded.enter().result(timeout=60) == 2
    assert recorded.sent == [1, 2]


def test_a_failing_send_blocks_nobody_and_its_id_is_spent(recorded: RecordedQueue) -> None:
    futures = [recorded.enter(send=broken), recorded.enter(), recorded.enter(send=broken)]
    last = recorded.enter()
    assert last.result(timeout=60) == 4
    assert isinstance(futures[0].exception(timeout=60), RequestFailedError)
    assert futures[1].result(timeout=60) == 2
    assert isinstance(futures[2].exception(timeout=60), RequestFailedError)
    assert recorded.sent == [1, 2, 3, 4]


def test_a_crash_of_any_kind_resolves_its_future(recorded: RecordedQueue) -> None:
    async def crash(_: Any) -> None:
        raise ZeroDivisionError

    sending, receiving = recorded.enter(send=crash), recorded.enter(receive=crash)
    assert isinstance(sending.exception(timeout=60), ZeroDivisionError)
    assert isinstance(receiving.exception(timeout=60), ZeroDivisionError)
    assert recorded.enter().result(timeout=60) == 3


def test_a_cancelled_operation_that_still_waits_is_never_sent(recorded: RecordedQueue) -> None:
    held = threading.Event()
    first = recorded.enter(send=lambda _: asyncio.to_thread(held.wait, 5))
    waiting = [recorded.enter() for _ in range(3)]
    last = recorded.enter()
    assert waiting[0].cancel()
    assert waiting[2].cancel()
    held.set()
    assert last.result(timeout=60) == 5
    assert waiting[1].result(timeout=60) == 3
    assert recorded.sent == [1, 3, 5]
    assert first.result(timeout=60) is True


def test_an_operation_cancelled_while_it_is_sent_frees_the_road(recorded: RecordedQueue) -> None:
    began = threading.Event()

    async def stuck(_: int) -> None:
        began.set()
        await asyncio.Event().wait()

    first, second = recorded.enter(send=stuck), recorded.enter()
    assert began.wait(60)
    assert first.cancel()
    assert second.result(timeout=60) == 2
    with pytest.raises(CancelledError):
        first.result(timeout=60)


def test_cancelling_after_the_send_stops_the_waiting_only(recorded: RecordedQueue) -> None:
    ended = threading.Event()

    async def wait(_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = recorded.enter(receive=wait)
    assert recorded.enter().result(timeout=60) == 2
    future.cancel()
    assert ended.wait(60)
    assert recorded.sent == [1, 2]


# --- the end ------------------------------------------------------------------------------


def test_a_closed_client_takes_nothing_more(recorded: RecordedQueue) -> None:
    recorded.holder.is_closed = True
    with pytest.raises(ClientClosed):
        recorded.enter()
    assert recorded.prepared == []


def test_what_still_waits_when_the_client_is_closed_is_told_so(recorded: RecordedQueue) -> None:
    held, began = threading.Event(), threading.Event()

    async def slow(_: int) -> None:
        began.set()
        await asyncio.to_thread(held.wait, 5)

    recorded.enter(send=slow)
    waiting = recorded.enter()
    assert began.wait(60)
    recorded.holder.is_closed = True
    held.set()
    with pytest.raises(ClientClosed):
        waiting.result(timeout=60)
    assert recorded.sent == [1]


def test_every_operation_is_timed_once(recorded: RecordedQueue) -> None:
    recorded.enter(3).result(timeout=60)
    recorded.enter(send=broken).exception(timeout=60)
    recorded.enter().result(timeout=60)
    # The road reports before it goes on; the last report may be a moment behind its future.
    recorded.enter().result(timeout=60)
    timings = recorded.holder.timings[:3]
    assert [(t.operation, t.num_requests, t.ok) for t in timings] == [
        ("optim_step", 3, True),
        ("optim_step", 1, False),
        ("optim_step", 1, True),
    ]
    assert all(0.0 <= t.submit_seconds <= t.seconds < 5.0 for t in timings)
