"""Token streams of a worker with the fake engine, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.integration.jobs.conftest import BASE_MODEL, WorkerHarness
from tests.support.stream_reader import CollectedTokens, StreamReader, open_reader
from tinkex.engine.fake.engine import FakeEngine
from tinkex.jobs.token_streams import ServerStopping

LIMIT_SECONDS = 60.0
SECONDS_PER_TOKEN = 0.02


def run_with_reader(
    harness: WorkerHarness, use: Callable[[StreamReader], Awaitable[None]], **options: object
) -> None:
    """Run a test on an event loop with the API side of token streams."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT_SECONDS), open_reader(harness.url, **options) as reader:
            await use(reader)

    asyncio.run(main())


@pytest.fixture
def slow_harness(harness: WorkerHarness) -> WorkerHarness:
    harness.start(FakeEngine([BASE_MODEL], seconds_per_token=SECONDS_PER_TOKEN))
    return harness


def test_tokens_arrive_one_by_one(slow_harness: WorkerHarness) -> None:
    tenant_id = slow_harness.tenant()

    async def use(reader: StreamReader) -> None:
        collected = await reader.collect(reader.submit(tenant_id, max_tokens=40))
        assert len(collected.tokens[0]) == 40
        # The first may arrive together, because the connection is opened meanwhile.
        assert collected.num_messages > 10
        assert reader.streams.num_open == 0
        assert reader.streams.num_connections == 1

    run_with_reader(slow_harness, use)


def test_sequences_of_a_request_have_their_own_offsets(slow_harness: WorkerHarness) -> None:
    tenant_id = slow_harness.tenant()

    async def use(reader: StreamReader) -> None:
        job = reader.submit(tenant_id, max_tokens=20, num_samples=3, topk=2)
        collected = await reader.collect(job)
        assert sorted(collected.tokens) == [0, 1, 2]
        assert collected.num_messages > 15

    run_with_reader(slow_harness, use)


def test_a_late_reader_receives_everything(slow_harness: WorkerHarness) -> None:
    tenant_id = slow_harness.tenant()

    async def use(reader: StreamReader) -> None:
        job = reader.submit(tenant_id, max_tokens=40)
        first, received = reader.streams.follow(job.id), CollectedTokens()
        tokens = aiter(first)
        for _ in range(10):
            received.add([await anext(tokens)])
        collected = await reader.collect(job)
        assert collected.num_messages > 5
        async for progress in tokens:
            received.add([progress])
        reader.finish(job, first, received)
        assert received.num_messages > 15

    run_with_reader(slow_harness, use)


def test_a_finished_job_has_no_stream(harness: WorkerHarness) -> None:
    harness.start()
    tenant_id = harness.tenant()

    async def use(reader: StreamReader) -> None:
        job = reader.submit(tenant_id)
        await asyncio.to_thread(harness.result, job)
        collected = await reader.collect(job)
        assert collected.num_messages == 1

    run_with_reader(harness, use)


def test_a_stream_without_a_worker_waits_for_one(harness: WorkerHarness) -> None:
    tenant_id = harness.tenant()

    async def use(reader: StreamReader) -> None:
        job = reader.submit(tenant_id, max_tokens=100)
        following = asyncio.create_task(reader.collect(job))
        engine = FakeEngine([BASE_MODEL], seconds_per_token=SECONDS_PER_TOKEN)
        await asyncio.to_thread(harness.start, engine)
        collected = await following
        assert collected.num_messages > 10

    run_with_reader(harness, use)


def test_a_worker_that_starts_again_continues_the_stream(harness: WorkerHarness) -> None:
    tenant_id = harness.tenant()

    async def use(reader: StreamReader) -> None:
        harness.start(FakeEngine([BASE_MODEL], seconds_per_token=SECONDS_PER_TOKEN))
        job = reader.submit(tenant_id, max_tokens=120)
        stream = reader.streams.follow(job.id)
        received = []
        async for progress in stream:
            received.append(progress)
            if len(received) == 5:
                await asyncio.to_thread(harness.kill)
                engine = FakeEngine([BASE_MODEL], seconds_per_token=SECONDS_PER_TOKEN)
                await asyncio.to_thread(harness.start, engine)
        received += stream.rest(reader.stored(job).sequences)
        tokens = [token for progress in received for token in progress.tokens]
        assert tokens == reader.stored(job).sequences[0].tokens
        assert len(received) > 20

    run_with_reader(harness, use)


def test_a_stopping_server_ends_streams(slow_harness: WorkerHarness) -> None:
    tenant_id = slow_harness.tenant()

    async def use(reader: StreamReader) -> None:
        stream = reader.streams.follow(reader.submit(tenant_id, max_tokens=400).id)
        with pytest.raises(ServerStopping):
            async for _ in stream:
                reader.waiters.release_all()

    run_with_reader(slow_harness, use)


def test_a_stream_ends_at_its_time_limit(slow_harness: WorkerHarness) -> None:
    tenant_id = slow_harness.tenant()

    async def use(reader: StreamReader) -> None:
        job = reader.submit(tenant_id, max_tokens=2000)
        received = [progress async for progress in reader.streams.follow(job.id, 0.5)]
        assert 1 < len(received) < 100
        assert not reader.queue.find(tenant_id, job.id).is_finished

    run_with_reader(slow_harness, use)
