"""Futures: resolved once, awaitable on any loop, cancellable."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tinkex.client.future import APIFuture, map_future
from tinkex.errors import ClientClosed, InvalidInput


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# --- resolution ---------------------------------------------------------------------------


def test_result_returns_value() -> None:
    future: APIFuture[int] = APIFuture()
    assert not future.done()
    future.settle(7)
    assert (future.done(), future.result(), future.exception()) == (True, 7, None)
    assert future.future() is future
    assert isinstance(future, concurrent.futures.Future)


def test_result_raises_error() -> None:
    future: APIFuture[int] = APIFuture()
    error = InvalidInput("no")
    future.fail(error)
    assert future.exception() is error
    with pytest.raises(InvalidInput, match="no"):
        future.result()


def test_first_outcome_wins() -> None:
    future: APIFuture[int] = APIFuture()
    future.settle(1)
    future.settle(2)
    future.fail(ValueError("late"))
    assert (future.result(), future.cancel(), future.cancelled()) == (1, False, False)
    failed: APIFuture[int] = APIFuture()
    failed.fail(KeyError("first"))
    failed.settle(2)
    with pytest.raises(KeyError):
        failed.result()


def test_concurrent_settle_resolves_once() -> None:
    future: APIFuture[int] = APIFuture()
    seen: list[int] = []
    future.add_done_callback(lambda done: seen.append(done.result()))
    threads = [in_thread(partial(future.settle, number)) for number in range(20)]
    for thread in threads:
        thread.join()
    assert seen == [future.result()]


def test_result_timeout_leaves_the_future_pending() -> None:
    future: APIFuture[int] = APIFuture()
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    assert not future.cancelled()
    future.settle(3)
    assert future.result(timeout=0.01) == 3


def test_callbacks_added_before_and_after_resolution_run() -> None:
    future: APIFuture[int] = APIFuture()
    seen: list[tuple[str, int]] = []
    future.add_done_callback(lambda done: seen.append(("early", done.result())))
    future.settle(1)
    future.add_done_callback(lambda done: seen.append(("late", done.result())))
    assert seen == [("early", 1), ("late", 1)]


# --- cancelling ---------------------------------------------------------------------------


def test_cancel_stops_work() -> None:
    future: APIFuture[int] = APIFuture()
    stopped: list[str] = []
    future.stop_with(lambda: stopped.append("stop"))
    assert future.cancel()
    assert stopped == ["stop"]
    future.settle(1)
    future.fail(ValueError("late"))
    assert future.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()


def test_stop_function_set_after_cancel_is_called() -> None:
    future: APIFuture[int] = APIFuture()
    future.cancel()
    stopped: list[str] = []
    future.stop_with(lambda: stopped.append("stop"))
    assert stopped == ["stop"]


def test_latest_stop_function_is_called() -> None:
    future: APIFuture[int] = APIFuture()
    stopped: list[str] = []
    future.stop_with(lambda: stopped.append("sending"))
    future.stop_with(lambda: stopped.append("receiving"))
    future.cancel()
    assert stopped == ["receiving"]


def test_repeated_and_concurrent_cancel() -> None:
    future: APIFuture[int] = APIFuture()
    answers: list[bool] = []
    threads = [in_thread(lambda: answers.append(future.cancel())) for _ in range(20)]
    for thread in threads:
        thread.join()
    assert answers == [True] * 20
    assert future.cancel()


def test_wait_reports_cancelled_future() -> None:
    futures: list[APIFuture[int]] = [APIFuture() for _ in range(3)]
    futures[0].settle(0)
    futures[1].cancel()
    futures[2].fail(ValueError("x"))
    done, not_done = concurrent.futures.wait(futures, timeout=60.0)
    assert (len(done), len(not_done)) == (3, 0)
    assert set(concurrent.futures.as_completed(futures, timeout=60.0)) == set(futures)


def test_running_wait_reports_cancelled_future() -> None:
    future: APIFuture[int] = APIFuture()
    timer = threading.Timer(0.02, future.cancel)
    timer.start()
    done, _ = concurrent.futures.wait([future], timeout=60.0)
    timer.join()
    assert done == {future}


# --- awaiting -----------------------------------------------------------------------------


def test_future_is_awaitable_on_any_loop() -> None:
    future: APIFuture[str] = APIFuture()
    timer = threading.Timer(0.01, future.settle, ["x"])

    async def on_one_loop() -> str:
        timer.start()
        return await future

    async def on_another() -> str:
        return await future.result_async()

    assert (asyncio.run(on_one_loop()), asyncio.run(on_another())) == ("x", "x")
    timer.join()


def test_coroutine_can_be_used_as_task() -> None:
    async def main() -> list[int]:
        future: APIFuture[int] = APIFuture()
        first, second = future.coroutine(), future.coroutine()
        assert asyncio.iscoroutine(first) and first is not second
        task = asyncio.create_task(first)
        asyncio.get_running_loop().call_soon(future.settle, 5)
        return [await task, *await asyncio.gather(second, future.coroutine())]

    assert asyncio.run(main()) == [5, 5, 5]


def test_several_tasks_await_one_future() -> None:
    async def main() -> list[int]:
        future: APIFuture[int] = APIFuture()
        waiting = asyncio.gather(*(future.result_async() for _ in range(5)), future)
        await asyncio.sleep(0)
        in_thread(lambda: future.settle(4)).join()
        return list(await waiting)

    assert asyncio.run(main()) == [4] * 6


def test_await_raises_error() -> None:
    async def main() -> None:
        future: APIFuture[int] = APIFuture()
        future.fail(InvalidInput("no"))
        await future

    with pytest.raises(InvalidInput, match="no"):
        asyncio.run(main())


def test_timeout_leaves_operation_running() -> None:
    stopped: list[str] = []

    async def main() -> int:
        future: APIFuture[int] = APIFuture()
        future.stop_with(lambda: stopped.append("stop"))
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.01)
        assert not future.cancelled()
        future.settle(5)
        return await future.result_async(timeout=1.0)

    assert asyncio.run(main()) == 5
    assert stopped == []


def test_error_after_timeout_is_not_reported_as_unretrieved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        future: APIFuture[int] = APIFuture()
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.001)
        future.fail(ValueError("late"))
        for _ in range(3):
            await asyncio.sleep(0)
        del future
        gc.collect()

    with caplog.at_level(logging.DEBUG):
        asyncio.run(main())
    assert "late" not in caplog.text


def test_result_after_loop_closed_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    future: APIFuture[int] = APIFuture()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.001)

    asyncio.run(main())
    future.settle(1)
    assert "exception calling callback" not in caplog.text


def test_cancelling_awaiter_cancels_operation() -> None:
    async def main() -> APIFuture[int]:
        future: APIFuture[int] = APIFuture()
        waiting = asyncio.ensure_future(future.result_async())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        return future

    assert asyncio.run(main()).cancelled()


def test_cancelled_operation_cancels_awaiter() -> None:
    async def main() -> None:
        future: APIFuture[int] = APIFuture()
        future.cancel()
        await future

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


# --- follow -------------------------------------------------------------------------------


async def followed(work: Any) -> tuple[APIFuture[Any], asyncio.Task[Any]]:
    future: APIFuture[Any] = APIFuture()
    task = asyncio.ensure_future(work)
    future.follow(task, asyncio.get_running_loop())
    return future, task


def test_follow_copies_value() -> None:
    async def main() -> Any:
        future, _ = await followed(asyncio.sleep(0, "x"))
        return await future

    assert asyncio.run(main()) == "x"


def test_follow_copies_error() -> None:
    async def broken() -> None:
        raise KeyError("k")

    async def main() -> None:
        future, _ = await followed(broken())
        await future

    with pytest.raises(KeyError):
        asyncio.run(main())


def test_cancelling_future_cancels_task() -> None:
    async def main() -> tuple[bool, bool]:
        future, task = await followed(asyncio.sleep(100))
        in_thread(future.cancel).join()
        await asyncio.wait([task])
        return future.cancelled(), task.cancelled()

    assert asyncio.run(main()) == (True, True)


def test_task_cancelled_elsewhere_fails_future() -> None:
    async def main() -> None:
        future, task = await followed(asyncio.sleep(100))
        task.cancel()
        await future

    with pytest.raises(ClientClosed, match="cancelled"):
        asyncio.run(main())


# --- map_future ---------------------------------------------------------------------------


def test_map_future_transforms_value() -> None:
    source: APIFuture[int] = APIFuture()
    target = map_future(source, lambda value: value + 1)
    assert not target.done()
    source.settle(1)
    assert target.result(timeout=0) == 2
    assert map_future(source, str).result(timeout=0) == "1"


def test_map_future_propagates_errors() -> None:
    source: APIFuture[int] = APIFuture()
    target = map_future(source, lambda value: 1 // value)
    error = InvalidInput("no")
    source.fail(error)
    assert target.exception(timeout=0) is error
    zero: APIFuture[int] = APIFuture()
    broken = map_future(zero, lambda value: 1 // value)
    zero.settle(0)
    assert isinstance(broken.exception(timeout=0), ZeroDivisionError)


def test_map_future_propagates_cancel_both_ways() -> None:
    source: APIFuture[int] = APIFuture()
    stopped: list[str] = []
    source.stop_with(lambda: stopped.append("stop"))
    middle = map_future(source, str)
    target = map_future(middle, str)
    assert target.cancel()
    assert source.cancelled()
    assert middle.cancelled()
    assert "stop" in stopped
    other: APIFuture[int] = APIFuture()
    below = map_future(map_future(other, str), str)
    other.cancel()
    assert below.cancelled()
    everything: list[APIFuture[Any]] = [source, middle, target, other, below]
    done, _ = concurrent.futures.wait(everything, timeout=60.0)
    assert len(done) == 5


def test_resolved_future_cannot_be_cancelled() -> None:
    source: APIFuture[int] = APIFuture()
    source.settle(1)
    target = map_future(source, str)
    assert not target.cancel()
    assert target.result() == "1"
