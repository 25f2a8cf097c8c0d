"""Futures: resolved once, awaited anywhere, cancelled without a hang."""

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


# --- resolving ----------------------------------------------------------------------------


def test_a_value() -> None:
    future: APIFuture[int] = APIFuture()
    assert not future.done()
    future.settle(7)
    assert (future.done(), future.result(), future.exception()) == (True, 7, None)
    assert future.future() is future
    assert isinstance(future, concurrent.futures.Future)


def test_an_error() -> None:
    future: APIFuture[int] = APIFuture()
    error = InvalidInput("no")
    future.fail(error)
    assert future.exception() is error
    with pytest.raises(InvalidInput, match="no"):
        future.result()


def test_the_first_outcome_stays() -> None:
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


def test_many_threads_settle_it_once() -> None:
    future: APIFuture[int] = APIFuture()
    seen: list[int] = []
    future.add_done_callback(lambda done: seen.append(done.result()))
    threads = [in_thread(partial(future.settle, number)) for number in range(20)]
    for thread in threads:
        thread.join()
    assert seen == [future.result()]


def test_blocking_with_a_time_limit() -> None:
    future: APIFuture[int] = APIFuture()
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    assert not future.cancelled()
    future.settle(3)
    assert future.result(timeout=0.01) == 3


def test_callbacks_run_before_and_after() -> None:
    future: APIFuture[int] = APIFuture()
    seen: list[tuple[str, int]] = []
    future.add_done_callback(lambda done: seen.append(("early", done.result())))
    future.settle(1)
    future.add_done_callback(lambda done: seen.append(("late", done.result())))
    assert seen == [("early", 1), ("late", 1)]


# --- cancelling ---------------------------------------------------------------------------


def test_cancelling_stops_the_work_and_stays() -> None:
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


def test_work_that_begins_after_the_cancel_is_stopped_too() -> None:
    future: APIFuture[int] = APIFuture()
    future.cancel()
    stopped: list[str] = []
    future.stop_with(lambda: stopped.append("stop"))
    assert stopped == ["stop"]


def test_the_newest_way_to_stop_counts() -> None:
    future: APIFuture[int] = APIFuture()
    stopped: list[str] = []
    future.stop_with(lambda: stopped.append("sending"))
    future.stop_with(lambda: stopped.append("receiving"))
    future.cancel()
    assert stopped == ["receiving"]


def test_cancelling_twice_and_from_many_threads_is_fine() -> None:
    future: APIFuture[int] = APIFuture()
    answers: list[bool] = []
    threads = [in_thread(lambda: answers.append(future.cancel())) for _ in range(20)]
    for thread in threads:
        thread.join()
    assert answers == [True] * 20
    assert future.cancel()


def test_whoever_waits_for_many_hears_of_a_cancelled_one() -> None:
    futures: list[APIFuture[int]] = [APIFuture() for _ in range(3)]
    futures[0].settle(0)
    futures[1].cancel()
    futures[2].fail(ValueError("x"))
    done, not_done = concurrent.futures.wait(futures, timeout=60.0)
    assert (len(done), len(not_done)) == (3, 0)
    assert set(concurrent.futures.as_completed(futures, timeout=60.0)) == set(futures)


def test_a_waiter_that_waits_already_hears_of_it_too() -> None:
    future: APIFuture[int] = APIFuture()
    timer = threading.Timer(0.02, future.cancel)
    timer.start()
    done, _ = concurrent.futures.wait([future], timeout=60.0)
    timer.join()
    assert done == {future}


# --- awaiting -----------------------------------------------------------------------------


def test_it_is_awaited_on_any_loop() -> None:
    future: APIFuture[str] = APIFuture()
    timer = threading.Timer(0.01, future.settle, ["x"])

    async def on_one_loop() -> str:
        timer.start()
        return await future

    async def on_another() -> str:
        return await future.result_async()

    assert (asyncio.run(on_one_loop()), asyncio.run(on_another())) == ("x", "x")
    timer.join()


def test_coroutines_are_made_for_tasks() -> None:
    async def main() -> list[int]:
        future: APIFuture[int] = APIFuture()
        first, second = future.coroutine(), future.coroutine()
        assert asyncio.iscoroutine(first) and first is not second
        task = asyncio.create_task(first)
        asyncio.get_running_loop().call_soon(future.settle, 5)
        return [await task, *await asyncio.gather(second, future.coroutine())]

    assert asyncio.run(main()) == [5, 5, 5]


def test_many_await_the_same() -> None:
    async def main() -> list[int]:
        future: APIFuture[int] = APIFuture()
        waiting = asyncio.gather(*(future.result_async() for _ in range(5)), future)
        await asyncio.sleep(0)
        in_thread(lambda: future.settle(4)).join()
        return list(await waiting)

    assert asyncio.run(main()) == [4] * 6


def test_an_error_is_raised_where_it_is_awaited() -> None:
    async def main() -> None:
        future: APIFuture[int] = APIFuture()
        future.fail(InvalidInput("no"))
        await future

    with pytest.raises(InvalidInput, match="no"):
        asyncio.run(main())


def test_running_out_of_time_leaves_the_operation_running() -> None:
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


def test_an_error_that_comes_after_the_time_ran_out_is_not_reported_as_lost(
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


def test_a_result_after_the_loop_has_closed_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    future: APIFuture[int] = APIFuture()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.001)

    asyncio.run(main())
    future.settle(1)
    assert "exception calling callback" not in caplog.text


def test_cancelling_whoever_awaits_it_cancels_the_operation() -> None:
    async def main() -> APIFuture[int]:
        future: APIFuture[int] = APIFuture()
        waiting = asyncio.ensure_future(future.result_async())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        return future

    assert asyncio.run(main()).cancelled()


def test_a_cancelled_operation_cancels_whoever_awaits_it() -> None:
    async def main() -> None:
        future: APIFuture[int] = APIFuture()
        future.cancel()
        await future

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


# --- following a task ---------------------------------------------------------------------


async def followed(work: Any) -> tuple[APIFuture[Any], asyncio.Task[Any]]:
    future: APIFuture[Any] = APIFuture()
    task = asyncio.ensure_future(work)
    future.follow(task, asyncio.get_running_loop())
    return future, task


def test_a_task_is_followed_to_its_value() -> None:
    async def main() -> Any:
        future, _ = await followed(asyncio.sleep(0, "x"))
        return await future

    assert asyncio.run(main()) == "x"


def test_and_to_its_error() -> None:
    async def broken() -> None:
        raise KeyError("k")

    async def main() -> None:
        future, _ = await followed(broken())
        await future

    with pytest.raises(KeyError):
        asyncio.run(main())


def test_cancelling_the_future_cancels_the_task() -> None:
    async def main() -> tuple[bool, bool]:
        future, task = await followed(asyncio.sleep(100))
        in_thread(future.cancel).join()
        await asyncio.wait([task])
        return future.cancelled(), task.cancelled()

    assert asyncio.run(main()) == (True, True)


def test_a_task_that_somebody_else_stopped_is_not_a_hang() -> None:
    async def main() -> None:
        future, task = await followed(asyncio.sleep(100))
        task.cancel()
        await future

    with pytest.raises(ClientClosed, match="stopped"):
        asyncio.run(main())


# --- changed values -----------------------------------------------------------------------


def test_a_changed_value() -> None:
    source: APIFuture[int] = APIFuture()
    target = map_future(source, lambda value: value + 1)
    assert not target.done()
    source.settle(1)
    assert target.result(timeout=0) == 2
    assert map_future(source, str).result(timeout=0) == "1"


def test_errors_pass_and_the_change_may_fail_too() -> None:
    source: APIFuture[int] = APIFuture()
    target = map_future(source, lambda value: 1 // value)
    error = InvalidInput("no")
    source.fail(error)
    assert target.exception(timeout=0) is error
    zero: APIFuture[int] = APIFuture()
    broken = map_future(zero, lambda value: 1 // value)
    zero.settle(0)
    assert isinstance(broken.exception(timeout=0), ZeroDivisionError)


def test_a_cancel_travels_up_and_down() -> None:
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


def test_a_value_that_is_there_cannot_be_cancelled() -> None:
    source: APIFuture[int] = APIFuture()
    source.settle(1)
    target = map_future(source, str)
    assert not target.cancel()
    assert target.result() == "1"
