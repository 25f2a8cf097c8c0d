"""Timers and waits across loops."""

from __future__ import annotations

import asyncio

from tinkex.testing.timers import LoopClock, wake


def test_a_timer_survives_a_change_of_loops() -> None:
    clock, fired = LoopClock(), list[str]()

    async def first() -> None:
        clock.attach(asyncio.get_running_loop())
        clock.later(0.01, lambda: fired.append("timer"))
        clock.later(0.01, lambda: fired.append("never")).cancel()
        clock.detach()

    async def second() -> None:
        clock.attach(asyncio.get_running_loop())
        await asyncio.sleep(0.03)

    asyncio.run(first())
    assert fired == []
    asyncio.run(second())
    assert fired == ["timer"]


def test_a_wait_ends_by_waking_by_time_or_by_the_end_of_the_server() -> None:
    async def scene() -> list[bool]:
        clock = LoopClock()
        assert await clock.wait(5.0) is False, "no loop, no wait"
        clock.attach(asyncio.get_running_loop())
        waiters: set[asyncio.Future[bool]] = set()
        woken = asyncio.ensure_future(clock.wait(5.0, waiters))
        slept = asyncio.ensure_future(clock.wait(0.01, set()))
        left = asyncio.ensure_future(clock.wait(5.0))
        await asyncio.sleep(0)
        wake(waiters)
        outcomes = [await woken, await slept]
        clock.detach()
        assert waiters == set()
        return [*outcomes, await left]

    assert asyncio.run(scene()) == [True, False, False]
