"""A tenant uses one thread at a time, also if its clients do not wait."""

from __future__ import annotations

import asyncio
import threading

from tinkex.server.http.request_context import TenantThreads

TIMEOUT_SECONDS = 10.0


def test_abandoned_work_counts_until_its_thread_is_free() -> None:
    threads, release = TenantThreads(2, "test"), threading.Event()

    async def abandon() -> None:
        work = threads.run("hostile", lambda: release.wait(TIMEOUT_SECONDS))
        task = asyncio.create_task(work)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})

    async def run() -> str:
        await abandon()
        await abandon()
        try:
            other = threads.run("other", lambda: "done")
            return await asyncio.wait_for(other, TIMEOUT_SECONDS / 2)
        finally:
            release.set()

    assert asyncio.run(run()) == "done"


def test_thread_is_free_after_success_and_failure() -> None:
    threads = TenantThreads(1, "test")

    async def run() -> list[object]:
        calls = [threads.run("tenant", work) for work in (lambda: 1, lambda: 1 // 0, lambda: 2)]
        return [type(done) for done in await asyncio.gather(*calls, return_exceptions=True)]

    assert asyncio.run(run()) == [int, ZeroDivisionError, int]
