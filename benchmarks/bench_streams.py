"""Token streams: what they cost a worker, and how late a token arrives in the API process.

Everything is a ratio to a decode step of tinkex/tiny with 8 sequences, in the same run. The worker
and the API process are one process here, with a real connection between their parts.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median

from benchmarks import Row, at_least, at_most
from tinkex import ModelInput, SamplingParams, clock
from tinkex.engine.config import EngineConfig
from tinkex.engine.protocol import SamplerSource
from tinkex.engine.torch_engine import TorchEngine
from tinkex.jobs.sample_publisher import SamplePublisher
from tinkex.jobs.token_stream_messages import Message, Progress
from tinkex.jobs.token_stream_server import TokenStreamServer
from tinkex.jobs.worker_connections import WorkerConnections
from tinkex.models import built_in
from tinkex.store import coordination
from tinkex.store.database import Database
from tinkex.store.migrations import migrate
from tinkex.store.records import JobRecord, ProcessRecord
from tinkex.system.addresses import network_id
from tinkex.types import SampleRequest

MODEL, SECRET = "tinkex/tiny", b"benchmark"
NUM_SEQUENCES, NUM_TOKENS = 8, 200
NUM_ROUNDS = 5
NUM_CALLS = 100_000


def decode(engine: TorchEngine, publish: Callable[[], None] = lambda: None) -> tuple[float, int]:
    """Sample 8 sequences; return the duration and the number of steps."""
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=1, stop=[])
    request = SampleRequest(prompt=ModelInput.from_ints([5, 6, 7]), sampling_params=params)
    for index in range(NUM_SEQUENCES):
        engine.start_sample(str(index), SamplerSource(base_model=MODEL), request)
    started, num_steps = time.perf_counter(), 0
    while engine.num_samples:
        engine.step_samples()
        publish()
        num_steps += 1
    return time.perf_counter() - started, num_steps


def find_nothing(_: str) -> JobRecord | None:
    """No job runs that somebody watches."""
    return None


def measure_idle(engine: TorchEngine, server: TokenStreamServer) -> Row:
    """The cost of a step's truth test while nobody streams."""
    publisher = SamplePublisher(engine, server)
    started = time.perf_counter()
    for _ in range(NUM_CALLS):
        publisher.publish(find_nothing)
    call_us = (time.perf_counter() - started) / NUM_CALLS * 1e6
    step_us = decode(engine)[0] / NUM_TOKENS * 1e6
    return at_most("publishing when nobody streams : decode step", call_us, step_us, "us", 0.001)


async def measure_streaming(
    engine: TorchEngine, server: TokenStreamServer, database: Database
) -> list[Row]:
    """Throughput with all samples watched against none, and the latency of a token."""
    late_by: list[float] = []
    num_received = 0

    def receive(_: object, message: Message) -> None:
        nonlocal num_received
        if isinstance(message, Progress):
            num_received += sum(len(part.tokens) for part in message.parts)
            late_by.append(time.perf_counter() - sent_at)

    sent_at = 0.0

    def publish() -> None:
        nonlocal sent_at
        for job_id in server.take_changes().watched:
            server.start_job(job_id, 1)
            engine.watch_sample(job_id)
        progress = engine.sample_progress()
        sent_at = time.perf_counter()
        server.send_progress(progress)

    connections = WorkerConnections(database, SECRET, receive, lambda _: None, list)
    without, with_streams, step_ms = [], [], []
    for _ in range(NUM_ROUNDS):
        seconds, _ = await asyncio.to_thread(decode, engine)
        without.append(NUM_SEQUENCES * NUM_TOKENS / seconds)
        step_ms.append(seconds / NUM_TOKENS * 1e3)
        for index in range(NUM_SEQUENCES):
            connections.watch(str(index))
        async with asyncio.timeout(30):
            while not server.is_active:
                await asyncio.sleep(0.01)
        seconds, _ = await asyncio.to_thread(decode, engine, publish)
        with_streams.append(NUM_SEQUENCES * NUM_TOKENS / seconds)
        for index in range(NUM_SEQUENCES):
            server.finish_job(str(index))
            connections.unwatch(str(index))
    await connections.close()
    assert num_received > NUM_ROUNDS * NUM_SEQUENCES * NUM_TOKENS // 2
    late_ms = median(late_by) * 1e3
    return [
        at_least(
            "8 watched samples : 8 others", median(with_streams), median(without), "tok/s", 0.9
        ),
        at_most("token to the API process : decode step", late_ms, median(step_ms), "ms", 1.0),
    ]


def main() -> list[Row]:
    """Rows for the common table."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{Path(folder) / 'store.db'}")
        server = TokenStreamServer(SECRET)
        engine = TorchEngine({MODEL: built_in()[MODEL]}, EngineConfig(threads=1))
        with closing(database), closing(server), closing(engine):
            migrate(database)
            now = clock.now()
            worker = ProcessRecord(
                id="worker",
                role="worker",
                bell="127.0.0.1:9",
                started_at=now,
                seen_at=now,
                network=network_id(),
                stream_address=server.address,
            )
            database.write(lambda db: coordination.register_process(db, worker))
            decode(engine)
            idle = measure_idle(engine, server)
            return [idle, *asyncio.run(measure_streaming(engine, server, database))]
