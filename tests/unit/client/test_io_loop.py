"""The I/O loop: one thread, call order, cancellation."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tinkex.client.future import APIFuture
from tinkex.client.io_loop import HEARTBEAT_LOOP, IO_LOOP, IoLoop, gather_or_cancel
from tinkex.errors import WrongThread


@pytest.fixture(scope="module")
def loop() -> IoLoop:
    return IoLoop("tinkex-test")


def test_loop_runs_on_daemon_thread(loop: IoLoop) -> None:
    async def where() -> threading.Thread:
        return threading.current_thread()

    thread = loop.start(where()).result(timeout=60)
    assert thread.name == "tinkex-test"
    assert thread.daemon
    assert loop.start(where()).result(timeout=60) is thread


def test_start_returns_outcome(loop: IoLoop) -> None:
    async def broken() -> None:
        raise KeyError("k")

    assert loop.start(asyncio.sleep(0, "x")).result(timeout=60) == "x"
    with pytest.raises(KeyError):
        loop.start(broken()).result(timeout=60)


def test_posts_run_in_call_order(loop: IoLoop) -> None:
    seen: list[int] = []
    for number in range(2000):
        loop.post(seen.append, number)
    loop.start(asyncio.sleep(0)).result(timeout=60)
    assert seen == list(range(2000))


def test_posts_of_many_threads_are_ordered_per_thread(loop: IoLoop) -> None:
    seen: list[tuple[int, int]] = []

    def post(thread: int) -> None:
        for number in range(300):
            loop.post(seen.append, (thread, number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(post, range(8)))
    loop.start(asyncio.sleep(0)).result(timeout=60)
    assert len(seen) == 8 * 300
    for thread in range(8):
        assert [number for who, number in seen if who == thread] == list(range(300))


def test_post_from_loop_thread_runs(loop: IoLoop) -> None:
    done = threading.Event()
    loop.post(lambda: loop.post(done.set))
    assert done.wait(60)


def test_raising_action_does_not_stop_loop(loop: IoLoop) -> None:
    quiet: list[Any] = []

    async def hush() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: quiet.append(context))

    loop.start(hush()).result(timeout=60)
    loop.post(lambda: 1 // 0)
    assert loop.start(asyncio.sleep(0, "alive")).result(timeout=60) == "alive"
    assert isinstance(quiet[0]["exception"], ZeroDivisionError)


def test_blocking_on_io_thread_raises(loop: IoLoop) -> None:
    pending: APIFuture[int] = APIFuture()

    async def block() -> object:
        return pending.result()

    with pytest.raises(WrongThread, match="would deadlock"):
        loop.start(block()).result(timeout=60)
    pending.settle(3)
    assert loop.start(block()).result(timeout=60) == 3


def test_cancel_stops_running_coroutine(loop: IoLoop) -> None:
    started, stopped = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(100)
        finally:
            stopped.set()

    future = loop.start(work())
    assert started.wait(60)
    assert future.cancel()
    assert stopped.wait(60)


def test_coroutine_cancelled_before_start_never_runs(loop: IoLoop) -> None:
    gate, started = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()

    loop.post(gate.wait, 5)
    future = loop.start(work())
    future.cancel()
    gate.set()
    loop.start(asyncio.sleep(0)).result(timeout=60)
    assert not started.is_set()


def test_loop_restarts_after_fork() -> None:
    loop = IoLoop("tinkex-forked")
    assert loop.start(asyncio.sleep(0, 1)).result(timeout=60) == 1
    loop.post(lambda: None)
    loop.reset_after_fork()
    assert loop.start(asyncio.sleep(0, 2)).result(timeout=60) == 2


def test_heartbeats_have_separate_thread() -> None:
    async def name() -> str:
        return threading.current_thread().name

    names = [
        IO_LOOP.start(name()).result(timeout=60),
        HEARTBEAT_LOOP.start(name()).result(timeout=60),
    ]
    assert names == ["tinkex-io", "tinkex-heartbeats"]


# --- gather_or_cancel ---------------------------------------------------------------------


def test_gather_preserves_order() -> None:
    async def main() -> list[int]:
        return await gather_or_cancel(
            asyncio.sleep(0.01 * (3 - number), number) for number in range(3)
        )

    assert asyncio.run(main()) == [0, 1, 2]


def test_gather_without_coroutines() -> None:
    assert asyncio.run(gather_or_cancel([])) == []


def test_gather_failure_cancels_others_and_is_raised() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("slow")

    async def broken() -> None:
        await asyncio.sleep(0)
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        asyncio.run(gather_or_cancel([slow(), broken(), slow()]))
    assert ended == ["slow", "slow"]


def test_cancelling_gather_cancels_all() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("slow")

    async def main() -> None:
        task = asyncio.ensure_future(gather_or_cancel([slow(), slow()]))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())
    assert ended == ["slow", "slow"]
