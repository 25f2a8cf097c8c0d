"""Token streams of a worker with the fake engine, over real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
import sqlalchemy as sa

from tests.integration.jobs.conftest import BASE_MODEL, WorkerHarness, count
from tests.support.stream_reader import CollectedTokens, StreamReader, open_reader
from tinkex.engine.fake.engine import FakeEngine
from tinkex.jobs import token_stream_server, token_streams, worker_connections
from tinkex.jobs.orphaned_jobs import GONE_SECONDS, OrphanedJobs
from tinkex.jobs.streamed_tokens import StreamDiverged
from tinkex.jobs.token_streams import ServerStopping
from tinkex.store.schema import usage

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
        # What arrived while nobody read comes together.
        assert 10 < received.num_messages < 15

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
        job = reader.submit(tenant_id, max_tokens=20_000)
        received = [progress async for progress in reader.streams.follow(job.id, 0.5)]
        assert len(received) < 100
        assert not reader.queue.find(tenant_id, job.id).is_finished

    run_with_reader(slow_harness, use)


@pytest.mark.parametrize("seed", range(4))
def test_drops_and_cuts_give_the_stored_result(
    slow_harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The worker's frames get lost, and its connections break, at random."""
    tenant_id, rng = slow_harness.tenant(), random.Random(seed)
    enqueue = token_stream_server._Connection.enqueue
    num_lost = 0

    def lose(connection: token_stream_server._Connection, frame: bytes) -> bool:
        nonlocal num_lost
        luck = rng.random() if connection.is_trusted else 1.0
        num_lost += luck < 0.1
        if luck < 0.05:
            connection.is_broken = True
        return enqueue(connection, frame) if luck >= 0.1 else False

    monkeypatch.setattr(token_stream_server._Connection, "enqueue", lose)
    monkeypatch.setattr(worker_connections, "DISCOVERY_SECONDS", 0.05)

    async def use(reader: StreamReader) -> None:
        jobs = [reader.submit(tenant_id, max_tokens=40, num_samples=2, seed=n) for n in range(4)]
        collected = await asyncio.gather(*map(reader.collect, jobs))
        assert num_lost > 2
        assert max(each.num_messages for each in collected) > 5

    run_with_reader(slow_harness, use)


def test_a_slow_client_gets_the_rest_from_the_store(
    slow_harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id = slow_harness.tenant()
    monkeypatch.setattr(token_streams, "MAX_PENDING_TOKENS", 10)

    async def use(reader: StreamReader) -> None:
        job = reader.submit(tenant_id, max_tokens=40)
        stream, collected = reader.streams.follow(job.id), CollectedTokens()
        async for progress in stream:
            collected.add([progress])
            await asyncio.to_thread(slow_harness.result, job)
        assert len(collected.tokens[0]) <= 20
        reader.finish(job, stream, collected)

    run_with_reader(slow_harness, use)


def test_connections_are_closed_when_idle_and_opened_again(
    slow_harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id = slow_harness.tenant()
    monkeypatch.setattr(worker_connections, "DISCOVERY_SECONDS", 0.02)
    monkeypatch.setattr(worker_connections, "IDLE_SECONDS", 0.05)

    async def use(reader: StreamReader) -> None:
        for _ in range(2):
            collected = await reader.collect(reader.submit(tenant_id, max_tokens=20))
            assert collected.num_messages > 5
            while reader.streams.num_connections:
                await asyncio.sleep(0.01)

    run_with_reader(slow_harness, use)


def test_another_secret_receives_nothing(
    slow_harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id = slow_harness.tenant()
    handshake = worker_connections.Handshake
    monkeypatch.setattr(worker_connections, "Handshake", lambda _: handshake(b"guessed"))

    async def use(reader: StreamReader) -> None:
        collected = await reader.collect(reader.submit(tenant_id, max_tokens=20))
        assert collected.num_messages == 1, "everything comes from the store"
        assert reader.streams.num_connections == 0

    run_with_reader(slow_harness, use)


def test_a_sample_without_a_seed_that_starts_again_ends_the_stream(harness: WorkerHarness) -> None:
    tenant_id = harness.tenant()

    async def use(reader: StreamReader) -> None:
        harness.start(FakeEngine([BASE_MODEL], seconds_per_token=SECONDS_PER_TOKEN))
        job = reader.submit(tenant_id, max_tokens=100, seed=None)
        with pytest.raises(StreamDiverged, match="drew other tokens"):
            async for progress in reader.streams.follow(job.id):
                if progress.offset == 5:
                    await asyncio.to_thread(harness.kill)
                    engine = FakeEngine([BASE_MODEL], seconds_per_token=SECONDS_PER_TOKEN)
                    await asyncio.to_thread(harness.start, engine)

    run_with_reader(harness, use)


def test_a_cancelled_stream_frees_its_slot_and_counts_its_tokens(
    slow_harness: WorkerHarness,
) -> None:
    tenant_id = slow_harness.tenant()

    async def use(reader: StreamReader) -> None:
        job = reader.submit(tenant_id, max_tokens=20_000, process_id=reader.process_id)
        num_received = 0
        async for progress in reader.streams.follow(job.id):
            num_received += len(progress.tokens)
            if num_received >= 5:
                break
        assert await asyncio.wrap_future(reader.queue.cancel(tenant_id, job.id))
        while slow_harness.engine.num_samples or count_tokens(slow_harness, "sample") == 0:
            await asyncio.sleep(0.01)
        assert num_received <= count_tokens(slow_harness, "sample") < 200
        assert count_tokens(slow_harness, "prefill") == 3

    run_with_reader(slow_harness, use)


def test_jobs_of_a_process_that_is_gone_are_cancelled(slow_harness: WorkerHarness) -> None:
    tenant_id = slow_harness.tenant()
    now = 100.0

    async def use(reader: StreamReader) -> None:
        nonlocal now
        gone = reader.submit(tenant_id, max_tokens=20_000, process_id="gone")
        others = [
            reader.submit(tenant_id, max_tokens=20_000, process_id=reader.process_id),
            reader.submit(tenant_id, max_tokens=20_000),
        ]
        orphaned = OrphanedJobs(slow_harness.database, monotonic=lambda: now)
        assert orphaned.cancel() == []
        now += GONE_SECONDS - 1
        assert orphaned.cancel() == []
        now += 1
        assert orphaned.cancel() == [gone.id]
        assert orphaned.cancel() == []
        found = reader.queue.find(tenant_id, gone.id)
        assert found.is_finished and "cancelled" in (found.error or "")
        assert not any(reader.queue.find(tenant_id, job.id).is_finished for job in others)
        while slow_harness.engine.num_samples > 2:
            await asyncio.sleep(0.01)
        orphaned.close()

    run_with_reader(slow_harness, use)


def count_tokens(harness: WorkerHarness, kind: str) -> int:
    """The recorded usage of all tenants."""
    query = sa.select(sa.func.sum(usage.c.amount)).where(usage.c.kind == kind)
    return count(harness.database, query)
