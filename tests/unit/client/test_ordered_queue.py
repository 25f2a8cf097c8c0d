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


class Traffic:
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
def traffic() -> Traffic:
    return Traffic()


async def never(_: Any) -> None:
    await asyncio.Event().wait()


async def broken(_: Any) -> None:
    raise RequestFailedError("refused")


# --- order --------------------------------------------------------------------------------


def test_calls_without_waiting_are_sent_in_order(traffic: Traffic) -> None:
    futures = [traffic.enter() for _ in range(100)]
    assert [future.result(timeout=60) for future in futures] == list(range(1, 101))
    assert traffic.prepared == traffic.sent == list(range(FIRST_SEQ_ID, 101))


def test_a_call_of_several_requests_takes_several_ids(traffic: Traffic) -> None:
    futures = [traffic.enter(count) for count in (3, 1, 2)]
    assert [future.result(timeout=60) for future in futures] == [1, 4, 5]
    assert traffic.enter().result(timeout=60) == 7


def test_many_threads_share_ids_without_a_gap_and_sends_follow_ids(traffic: Traffic) -> None:
    start = threading.Barrier(8)

    def call(_: int) -> list[int]:
        start.wait()
        futures = [traffic.enter(1 + number % 3) for number in range(25)]
        return [future.result(timeout=60) for future in futures]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(8)))
    assert traffic.sent == traffic.prepared == sorted(traffic.prepared)
    # Each thread saw its own calls leave in its own order.
    assert all(mine == sorted(mine) for mine in results)
    assert sorted(first for mine in results for first in mine) == traffic.prepared
    last = traffic.enter().result(timeout=60)
    assert last == FIRST_SEQ_ID + 8 * sum(1 + number % 3 for number in range(25))


def test_ids_are_given_in_the_callers_thread(traffic: Traffic) -> None:
    held = threading.Event()
    traffic.enter(send=lambda _: asyncio.to_thread(held.wait, 5))
    traffic.enter()
    assert traffic.prepared == [1, 2]
    held.set()


def test_the_next_is_sent_only_when_the_server_has_the_last(traffic: Traffic) -> None:
    held, began = threading.Event(), threading.Event()

    async def slow(_: int) -> str:
        began.set()
        await asyncio.to_thread(held.wait, 5)
        return "taken"

    first, second = traffic.enter(send=slow), traffic.enter()
    assert began.wait(60)
    assert traffic.sent == [1]
    assert not second.done()
    held.set()
    assert (first.result(timeout=60), second.result(timeout=60)) == ("taken", 2)


def test_results_are_awaited_side_by_side(traffic: Traffic) -> None:
    first = traffic.enter(receive=never)
    assert traffic.enter().result(timeout=60) == 2
    assert not first.done()
    first.cancel()


# --- trouble ------------------------------------------------------------------------------


def test_a_refusal_while_preparing_uses_no_id_and_sends_nothing(traffic: Traffic) -> None:
    def refuse(first: int) -> Callable[[], Awaitable[Any]]:
        raise InvalidInput(f"not with {first}")

    assert traffic.enter().result(timeout=60) == 1
    with pytest.raises(InvalidInput, match="not with 2"):
        traffic.road.submit("optim_step", 3, refuse, never)
    assert traffic.enter().result(timeout=60) == 2
    assert traffic.sent == [1, 2]


def test_a_failing_send_blocks_nobody_and_its_id_is_spent(traffic: Traffic) -> None:
    futures = [traffic.enter(send=broken), traffic.enter(), traffic.enter(send=broken)]
    last = traffic.enter()
    assert last.result(timeout=60) == 4
    assert isinstance(futures[0].exception(timeout=60), RequestFailedError)
    assert futures[1].result(timeout=60) == 2
    assert isinstance(futures[2].exception(timeout=60), RequestFailedError)
    assert traffic.sent == [1, 2, 3, 4]


def test_a_crash_of_any_kind_resolves_its_future(traffic: Traffic) -> None:
    async def crash(_: Any) -> None:
        raise ZeroDivisionError

    sending, receiving = traffic.enter(send=crash), traffic.enter(receive=crash)
    assert isinstance(sending.exception(timeout=60), ZeroDivisionError)
    assert isinstance(receiving.exception(timeout=60), ZeroDivisionError)
    assert traffic.enter().result(timeout=60) == 3


def test_a_cancelled_operation_that_still_waits_is_never_sent(traffic: Traffic) -> None:
    held = threading.Event()
    first = traffic.enter(send=lambda _: asyncio.to_thread(held.wait, 5))
    waiting = [traffic.enter() for _ in range(3)]
    last = traffic.enter()
    assert waiting[0].cancel()
    assert waiting[2].cancel()
    held.set()
    assert last.result(timeout=60) == 5
    assert waiting[1].result(timeout=60) == 3
    assert traffic.sent == [1, 3, 5]
    assert first.result(timeout=60) is True


def test_an_operation_cancelled_while_it_is_sent_frees_the_road(traffic: Traffic) -> None:
    began = threading.Event()

    async def stuck(_: int) -> None:
        began.set()
        await asyncio.Event().wait()

    first, second = traffic.enter(send=stuck), traffic.enter()
    assert began.wait(60)
    assert first.cancel()
    assert second.result(timeout=60) == 2
    with pytest.raises(CancelledError):
        first.result(timeout=60)


def test_cancelling_after_the_send_stops_the_waiting_only(traffic: Traffic) -> None:
    ended = threading.Event()

    async def wait(_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = traffic.enter(receive=wait)
    assert traffic.enter().result(timeout=60) == 2
    future.cancel()
    assert ended.wait(60)
    assert traffic.sent == [1, 2]


# --- the end ------------------------------------------------------------------------------


def test_a_closed_client_takes_nothing_more(traffic: Traffic) -> None:
    traffic.holder.is_closed = True
    with pytest.raises(ClientClosed):
        traffic.enter()
    assert traffic.prepared == []


def test_what_still_waits_when_the_client_is_closed_is_told_so(traffic: Traffic) -> None:
    held, began = threading.Event(), threading.Event()

    async def slow(_: int) -> None:
        began.set()
        await asyncio.to_thread(held.wait, 5)

    traffic.enter(send=slow)
    waiting = traffic.enter()
    assert began.wait(60)
    traffic.holder.is_closed = True
    held.set()
    with pytest.raises(ClientClosed):
        waiting.result(timeout=60)
    assert traffic.sent == [1]


def test_every_operation_is_timed_once(traffic: Traffic) -> None:
    traffic.enter(3).result(timeout=60)
    traffic.enter(send=broken).exception(timeout=60)
    traffic.enter().result(timeout=60)
    # The road reports before it goes on; the last report may be a moment behind its future.
    traffic.enter().result(timeout=60)
    timings = traffic.holder.timings[:3]
    assert [(t.operation, t.num_requests, t.ok) for t in timings] == [
        ("optim_step", 3, True),
        ("optim_step", 1, False),
        ("optim_step", 1, True),
    ]
    assert all(0.0 <= t.submit_seconds <= t.seconds < 5.0 for t in timings)
