"""Per-model send queue: call order is preserved after failures and cancellations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

from tinkex.client.future import APIFuture
from tinkex.client.metrics import Timing
from tinkex.client.ordered_queue import FIRST_SEQ_ID, OrderedQueue
from tinkex.errors import ClientClosed, InvalidInput, RequestFailedError

Send = Callable[[int], Coroutine[Any, Any, Any]]


class StubHolder:
    """The part of Holder that OrderedQueue uses."""

    def __init__(self) -> None:
        self.is_closed = False
        self.timings: list[Timing] = []

    def check_usable(self) -> None:
        if self.is_closed:
            raise ClientClosed("This client is closed")

    def create_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)

    def record_timing(self, timing: Timing) -> None:
        self.timings.append(timing)


class RecordedQueue:
    """An OrderedQueue that records what it prepared and sent."""

    def __init__(self) -> None:
        self.holder = StubHolder()
        self.queue = OrderedQueue(self.holder)  # type: ignore[arg-type]
        self.prepared: list[int] = []
        self.sent: list[int] = []

    def submit(
        self,
        num_requests: int = 1,
        send: Send | None = None,
        receive: Callable[[Any], Coroutine[Any, Any, Any]] | None = None,
    ) -> APIFuture[Any]:
        def prepare(first: int) -> Callable[[], Coroutine[Any, Any, Any]]:
            self.prepared.append(first)
            return lambda: self._send(first, send)

        async def return_sent(sent: Any) -> Any:
            return sent

        return self.queue.submit("optim_step", num_requests, prepare, receive or return_sent)

    async def _send(
        self, first: int, send: Callable[[int], Coroutine[Any, Any, Any]] | None
    ) -> Any:
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


def test_calls_are_sent_in_order_without_awaiting(recorded: RecordedQueue) -> None:
    futures = [recorded.submit() for _ in range(100)]
    assert [future.result(timeout=60) for future in futures] == list(range(1, 101))
    assert recorded.prepared == recorded.sent == list(range(FIRST_SEQ_ID, 101))


def test_operation_reserves_one_id_per_request(recorded: RecordedQueue) -> None:
    futures = [recorded.submit(count) for count in (3, 1, 2)]
    assert [future.result(timeout=60) for future in futures] == [1, 4, 5]
    assert recorded.submit().result(timeout=60) == 7


def test_concurrent_calls_get_contiguous_ids_in_send_order(recorded: RecordedQueue) -> None:
    start = threading.Barrier(8)

    def call(_: int) -> list[int]:
        start.wait()
        futures = [recorded.submit(1 + number % 3) for number in range(25)]
        return [future.result(timeout=60) for future in futures]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(8)))
    assert recorded.sent == recorded.prepared == sorted(recorded.prepared)
    # Calls of each thread were sent in its own order.
    assert all(ids == sorted(ids) for ids in results)
    assert sorted(first for ids in results for first in ids) == recorded.prepared
    last = recorded.submit().result(timeout=60)
    assert last == FIRST_SEQ_ID + 8 * sum(1 + number % 3 for number in range(25))


def test_ids_are_assigned_in_callers_thread(recorded: RecordedQueue) -> None:
    release = threading.Event()
    recorded.submit(send=lambda _: asyncio.to_thread(release.wait, 5))
    recorded.submit()
    assert recorded.prepared == [1, 2]
    release.set()


def test_next_operation_waits_until_previous_is_sent(recorded: RecordedQueue) -> None:
    release, started = threading.Event(), threading.Event()

    async def slow(_: int) -> str:
        started.set()
        await asyncio.to_thread(release.wait, 5)
        return "taken"

    first, second = recorded.submit(send=slow), recorded.submit()
    assert started.wait(60)
    assert recorded.sent == [1]
    assert not second.done()
    release.set()
    assert (first.result(timeout=60), second.result(timeout=60)) == ("taken", 2)


def test_results_are_awaited_concurrently(recorded: RecordedQueue) -> None:
    first = recorded.submit(receive=never)
    assert recorded.submit().result(timeout=60) == 2
    assert not first.done()
    first.cancel()


# --- failures and cancellation ------------------------------------------------------------


def test_error_in_prepare_uses_no_id_and_sends_nothing(recorded: RecordedQueue) -> None:
    def refuse(first: int) -> Callable[[], Coroutine[Any, Any, Any]]:
        raise InvalidInput(f"not with {first}")

    assert recorded.submit().result(timeout=60) == 1
    with pytest.raises(InvalidInput, match="not with 2"):
        recorded.queue.submit("optim_step", 3, refuse, never)
    assert recorded.submit().result(timeout=60) == 2
    assert recorded.sent == [1, 2]


def test_failed_send_does_not_block_queue_and_uses_its_id(recorded: RecordedQueue) -> None:
    futures = [recorded.submit(send=broken), recorded.submit(), recorded.submit(send=broken)]
    last = recorded.submit()
    assert last.result(timeout=60) == 4
    assert isinstance(futures[0].exception(timeout=60), RequestFailedError)
    assert futures[1].result(timeout=60) == 2
    assert isinstance(futures[2].exception(timeout=60), RequestFailedError)
    assert recorded.sent == [1, 2, 3, 4]


def test_unexpected_exception_resolves_future(recorded: RecordedQueue) -> None:
    async def crash(_: Any) -> None:
        raise ZeroDivisionError

    sending, receiving = recorded.submit(send=crash), recorded.submit(receive=crash)
    assert isinstance(sending.exception(timeout=60), ZeroDivisionError)
    assert isinstance(receiving.exception(timeout=60), ZeroDivisionError)
    assert recorded.submit().result(timeout=60) == 3


def test_operation_cancelled_in_queue_is_never_sent(recorded: RecordedQueue) -> None:
    release = threading.Event()
    first = recorded.submit(send=lambda _: asyncio.to_thread(release.wait, 5))
    waiting = [recorded.submit() for _ in range(3)]
    last = recorded.submit()
    assert waiting[0].cancel()
    assert waiting[2].cancel()
    release.set()
    assert last.result(timeout=60) == 5
    assert waiting[1].result(timeout=60) == 3
    assert recorded.sent == [1, 3, 5]
    assert first.result(timeout=60) is True


def test_cancel_during_send_unblocks_queue(recorded: RecordedQueue) -> None:
    started = threading.Event()

    async def stuck(_: int) -> None:
        started.set()
        await asyncio.Event().wait()

    first, second = recorded.submit(send=stuck), recorded.submit()
    assert started.wait(60)
    assert first.cancel()
    assert second.result(timeout=60) == 2
    with pytest.raises(CancelledError):
        first.result(timeout=60)


def test_cancel_after_send_stops_waiting_only(recorded: RecordedQueue) -> None:
    ended = threading.Event()

    async def wait(_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = recorded.submit(receive=wait)
    assert recorded.submit().result(timeout=60) == 2
    future.cancel()
    assert ended.wait(60)
    assert recorded.sent == [1, 2]


# --- shutdown -----------------------------------------------------------------------------


def test_closed_client_rejects_operations(recorded: RecordedQueue) -> None:
    recorded.holder.is_closed = True
    with pytest.raises(ClientClosed):
        recorded.submit()
    assert recorded.prepared == []


def test_queued_operations_fail_when_client_is_closed(recorded: RecordedQueue) -> None:
    release, started = threading.Event(), threading.Event()

    async def slow(_: int) -> None:
        started.set()
        await asyncio.to_thread(release.wait, 5)

    recorded.submit(send=slow)
    waiting = recorded.submit()
    assert started.wait(60)
    recorded.holder.is_closed = True
    release.set()
    with pytest.raises(ClientClosed):
        waiting.result(timeout=60)
    assert recorded.sent == [1]


def test_every_operation_is_timed_once(recorded: RecordedQueue) -> None:
    recorded.submit(3).result(timeout=60)
    recorded.submit(send=broken).exception(timeout=60)
    recorded.submit().result(timeout=60)
    # Timings are recorded after the future resolves; the last one may be late.
    recorded.submit().result(timeout=60)
    timings = recorded.holder.timings[:3]
    assert [(t.operation, t.num_requests, t.ok) for t in timings] == [
        ("optim_step", 3, True),
        ("optim_step", 1, False),
        ("optim_step", 1, True),
    ]
    assert all(0.0 <= t.submit_seconds <= t.seconds < 5.0 for t in timings)
