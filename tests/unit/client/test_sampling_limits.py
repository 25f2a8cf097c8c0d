"""Sampling limits: shared per server and key, without storing the key."""

from __future__ import annotations

import asyncio
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from threading import Barrier
from typing import Any

import pytest

from tinkex.client import rate_limits
from tinkex.client.config import Config
from tinkex.client.rate_limits import RECOVERY_SLOTS, SamplingLimits, get_sampling_limits
from tinkex.types import ClientConfigResponse

KEY = "tml-very-secret"


def config(url: str = "http://lanes.test", **options: Any) -> Config:
    return Config(base_url=url, **options)


def test_same_server_and_key_share_limits() -> None:
    limits = get_sampling_limits(config(), KEY)
    assert get_sampling_limits(config(), KEY) is limits
    # URLs are compared after normalisation.
    assert get_sampling_limits(config("HTTP://Lanes.Test/"), KEY) is limits


def test_other_server_or_key_has_separate_limits() -> None:
    limits = get_sampling_limits(config(), KEY)
    others = [
        get_sampling_limits(config(), "tml-other"),
        get_sampling_limits(config(), None),
        get_sampling_limits(config("http://lanes.test/prefix"), KEY),
        get_sampling_limits(config("http://lanes.test:81"), KEY),
        get_sampling_limits(config("https://lanes.test"), KEY),
    ]
    assert len({id(item) for item in [limits, *others]}) == 6


def test_backoff_is_per_server_and_key() -> None:
    one, other = get_sampling_limits(config(), "tml-a"), get_sampling_limits(config(), "tml-b")
    one.limiter.back_off(30.0)
    assert get_sampling_limits(config(), "tml-a").limiter.is_backing_off()
    assert not other.limiter.is_backing_off()


def test_key_is_not_stored() -> None:
    limits = get_sampling_limits(config(), KEY)
    names = list(rate_limits._SHARED_LIMITS.keys())
    assert KEY not in repr(names) + repr(vars(limits))
    assert KEY.encode() not in pickle.dumps(names)
    assert ("http://lanes.test", KEY) not in names


def test_limits_are_released_when_unused() -> None:
    limits = get_sampling_limits(config("http://short-lived.test"), KEY)
    name = next(name for name in rate_limits._SHARED_LIMITS if name[0] == "http://short-lived.test")
    assert rate_limits._SHARED_LIMITS[name] is limits
    del limits
    gc.collect()
    assert name not in rate_limits._SHARED_LIMITS


def test_concurrent_creation_shares_limits() -> None:
    start = Barrier(16)

    def make(_: int) -> SamplingLimits:
        start.wait()
        return get_sampling_limits(config("http://race.test"), KEY)

    with ThreadPoolExecutor(16) as pool:
        created = list(pool.map(make, range(16)))
    assert len({id(limits) for limits in created}) == 1


def test_server_limit_is_applied() -> None:
    limits = SamplingLimits()
    assert limits.budget.limit_bytes == 10 * 1024 * 1024
    limits.apply_server_config(ClientConfigResponse(sample_dispatch_bytes_semaphore_size=5))
    assert limits.budget.limit_bytes == 5


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def run_submissions(limits: SamplingLimits, count: int, num_bytes: int = 1) -> int:
    """Return how many submissions run concurrently."""
    inside = 0
    done = asyncio.Event()

    async def submit() -> None:
        nonlocal inside
        async with limits.acquire(num_bytes):
            inside += 1
            await done.wait()

    tasks = [asyncio.create_task(submit()) for _ in range(count)]
    await settle()
    found = inside
    done.set()
    await asyncio.gather(*tasks)
    assert limits.budget.used_bytes == 0
    return found


def test_byte_budget_delays_submissions() -> None:
    limits = SamplingLimits()
    limits.apply_server_config(ClientConfigResponse(sample_dispatch_bytes_semaphore_size=100))
    assert asyncio.run(run_submissions(limits, 7, num_bytes=40)) == 2


def test_concurrency_ramps_up_after_backoff() -> None:
    limits = SamplingLimits()
    # Just after a back-off: no wait, but limited concurrency.
    limits.limiter.back_off(0.0)
    assert asyncio.run(run_submissions(limits, 3 * RECOVERY_SLOTS)) == RECOVERY_SLOTS


def test_extended_backoff_is_checked_after_sleeping() -> None:
    async def run() -> float:
        limits = SamplingLimits()
        limits.limiter.back_off(0.02)
        entered = asyncio.create_task(enter(limits))
        await asyncio.sleep(0.01)
        limits.limiter.back_off(0.05)
        return await entered

    async def enter(limits: SamplingLimits) -> float:
        async with limits.acquire(1):
            return limits.limiter.remaining_seconds()

    assert asyncio.run(run()) == 0.0


def test_failed_or_cancelled_submission_releases_limits() -> None:
    async def run() -> int:
        limits = SamplingLimits()
        limits.apply_server_config(ClientConfigResponse(sample_dispatch_bytes_semaphore_size=10))
        with pytest.raises(ZeroDivisionError):
            async with limits.acquire(10):
                raise ZeroDivisionError
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(limits.acquire(10))
            waiting = asyncio.create_task(stack.enter_async_context(limits.acquire(10)))
            await settle()
            waiting.cancel()
            await asyncio.wait([waiting])
        return await run_submissions(limits, 2, num_bytes=10)

    assert asyncio.run(run()) == 1


class TimerCountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts its timers."""

    num_set = 0

    def call_at(self, *args: Any, **options: Any) -> asyncio.TimerHandle:
        self.num_set += 1
        return super().call_at(*args, **options)


def test_waiting_submissions_set_no_timers() -> None:
    """Waiters are woken by the release of bytes, not by polling."""
    lane = SamplingLimits()
    lane.apply_server_config(ClientConfigResponse(sample_dispatch_bytes_semaphore_size=10))

    async def submit(num_bytes: int) -> None:
        async with lane.acquire(num_bytes):
            await asyncio.sleep(0)

    async def crowd() -> None:
        async with AsyncExitStack() as held:
            await held.enter_async_context(lane.acquire(10))
            waiting = [asyncio.create_task(submit(1 + number % 9)) for number in range(30)]
            for _ in range(20):
                await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
        await asyncio.gather(*waiting)

    with asyncio.Runner(loop_factory=TimerCountingLoop) as runner:
        runner.run(crowd())
        loop = runner.get_loop()
        assert isinstance(loop, TimerCountingLoop)
        assert loop.num_set == 0
