"""The server with the fake engine: latency, throughput, fairness and growth.

Clients are bare sockets in this process, so that what is measured is the server. A round trip is
the whole of it: an operation is posted, committed, done by the worker, committed, and its result
fetched.
`python -m benchmarks.bench_server 100000` measures growth over that many jobs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import Row, at_least, at_most

NUM_TRIPS = 300
NUM_CLIENTS = 64
NUM_GROWTH = 20_000
BUSY_SECONDS = 0.02
#: Its arithmetic takes far less than anything that is measured.
MODEL = "tinkex/tiny"
VOCABULARY = 16


class Server:
    """A server in processes of its own."""

    def __init__(self, home: Path, url: str) -> None:
        self.home = home
        self.port = int(url.rsplit(":", 1)[1])
        self.key = (home / "key").read_text().strip()

    @property
    def store_bytes(self) -> int:
        """The database with its log."""
        return sum(path.stat().st_size for path in self.home.glob("store.db*"))


@contextmanager
def serve(**options: str) -> Iterator[Server]:
    """`tinkex serve --engine fake` with a home of its own."""
    with tempfile.TemporaryDirectory() as directory:
        env = os.environ | {"OMP_NUM_THREADS": "1"} | options
        command = [sys.executable, "-m", "tinkex", "serve", "--engine", "fake", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--home", directory, "--model", f"{MODEL}={VOCABULARY}"],
            stdout=subprocess.PIPE,
            text=True,
            env=env | {"TINKEX_LOG": "error"},
        )
        try:
            assert process.stdout is not None
            yield Server(Path(directory), process.stdout.readline().split()[-1])
        finally:
            process.terminate()
            process.communicate()


class Connection:
    """One HTTP/1.1 connection that is kept open."""

    def __init__(self, server: Server, key: str) -> None:
        self._server = server
        self._head = f"Host: localhost\r\nX-API-Key: {key}\r\nContent-Type: application/json\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, path: str, message: dict[str, Any] | None = None) -> Any:
        """Post a message, or get; returns the JSON of an answer with status 200."""
        status, body = await self.send(path, message)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {body[:300]!r}")
        return json.loads(body)

    async def send(self, path: str, message: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """One request, one answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._server.port)
        reader, writer = self._streams
        body = b"" if message is None else json.dumps(message).encode()
        method = "GET" if message is None else "POST"
        head = f"{method} {path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        status = int(lines[0].split()[1])
        sizes = [line for line in lines if line.lower().startswith("content-length")]
        return status, await reader.readexactly(int(sizes[0].split(":")[1]))

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()


class Client:
    """A tenant's model, and the operations that are sent to it."""

    def __init__(self, connection: Connection, model_id: str) -> None:
        self.connection = connection
        self.model_id = model_id
        self.seq_id = 0

    async def round_trip(self) -> float:
        """Seconds from posting an optimizer step to holding its result."""
        started = time.perf_counter()
        self.seq_id += 1
        step = {"model_id": self.model_id, "seq_id": self.seq_id, "adam_params": {}}
        promise = await self.connection.call("/api/v1/optim_step", step)
        await self.result(promise["request_id"])
        return time.perf_counter() - started

    async def result(self, request_id: str) -> Any:
        """Poll until there is a result."""
        question = {"request_id": request_id, "allow_metadata_only": False}
        while True:
            status, body = await self.connection.send("/api/v1/retrieve_future", question)
            if status == 200:
                found = json.loads(body)
                if "error" in found:
                    raise RuntimeError(found["error"])
                return found
            if status != 408:
                raise RuntimeError(f"retrieve_future: {status} {body[:300]!r}")


@asynccontextmanager
async def client(server: Server, key: str | None = None) -> AsyncIterator[Client]:
    """A client with a session and a model of its own."""
    connection = Connection(server, key or server.key)
    opening = {"tags": [], "user_metadata": {}, "sdk_version": "bench"}
    session = await connection.call("/api/v1/create_session", opening)
    model = {
        "session_id": session["session_id"],
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 8},
    }
    promise = await connection.call("/api/v1/create_model", model)
    made = Client(connection, promise["model_id"])
    await made.result(promise["request_id"])
    yield made
    connection.close()


def new_key(server: Server, tenant: str) -> str:
    """A key of another tenant."""
    command = [sys.executable, "-m", "tinkex", "key", "create", "--tenant", tenant, "--json"]
    done = subprocess.run(
        [*command, "--home", str(server.home)], capture_output=True, text=True, check=True
    )
    key: str = json.loads(done.stdout)["key"]
    return key


def percentile(times: list[float], share: float) -> float:
    """In milliseconds."""
    return 1000.0 * sorted(times)[min(len(times) - 1, int(share * len(times)))]


# --- what is measured --------------------------------------------------------------------------
async def measure_trips(server: Server) -> list[Row]:
    """Round trips of one client and of many."""
    async with client(server) as alone:
        for _ in range(20):
            await alone.round_trip()
        bare = [await _timed(alone.connection.call("/api/v1/healthz")) for _ in range(NUM_TRIPS)]
        single = [await alone.round_trip() for _ in range(NUM_TRIPS)]
        many, seconds = await _crowd(server, NUM_CLIENTS, NUM_TRIPS // 10)
    rate = len(many) / seconds
    return [
        at_most("optim_step round trip, p50 : healthz", *_pair(single, bare, 0.5), "ms"),
        at_most("  p99 : healthz", *_pair(single, bare, 0.99), "ms"),
        at_least(
            f"round trips, {NUM_CLIENTS} clients : 1 client", rate, len(single) / sum(single), "/s"
        ),
        at_most(f"  p50, {NUM_CLIENTS} clients : 1 client", *_pair(many, single, 0.5), "ms"),
        at_most(f"  p99, {NUM_CLIENTS} clients : 1 client", *_pair(many, single, 0.99), "ms"),
    ]


async def _crowd(server: Server, num_clients: int, num_trips: int) -> tuple[list[float], float]:
    times: list[float] = []
    ready, go = asyncio.Semaphore(0), asyncio.Event()

    async def one() -> None:
        async with client(server) as mine:
            ready.release()
            await go.wait()
            times.extend([await mine.round_trip() for _ in range(num_trips)])

    tasks = [asyncio.create_task(one()) for _ in range(num_clients)]
    for _ in tasks:
        await ready.acquire()
    started = time.perf_counter()
    go.set()
    await asyncio.gather(*tasks)
    return times, time.perf_counter() - started


def _pair(ours: list[float], others: list[float], share: float) -> tuple[float, float]:
    return percentile(ours, share), percentile(others, share)


async def _timed(call: Any) -> float:
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


async def measure_busy(server: Server) -> list[Row]:
    """A quiet tenant and healthz while a loud tenant keeps the engine busy."""
    quiet_key, loud_key = new_key(server, "quiet"), new_key(server, "loud")
    async with client(server, quiet_key) as quiet, client(server, loud_key) as busy_clients:
        calm = [await quiet.round_trip() for _ in range(40)]
        flood = asyncio.create_task(_flood(server, loud_key, busy_clients))
        await asyncio.sleep(1.0)
        busy = [await quiet.round_trip() for _ in range(40)]
        healthy = []
        for _ in range(NUM_TRIPS):
            healthy.append(await _timed(quiet.connection.call("/api/v1/healthz")))
            await asyncio.sleep(0.005)
        flood.cancel()
    name = "a quiet tenant's round trip, flooded : calm"
    return [
        at_most(name, 1000.0 * median(busy), 1000.0 * median(calm), "ms", 2.0),
        at_most(
            "healthz p99 while the engine is busy : 50 ms",
            percentile(healthy, 0.99),
            50.0,
            "ms",
            1.0,
        ),
    ]


async def _flood(server: Server, key: str, busy_clients: Client) -> None:
    """Keep a thousand operations waiting."""
    connection = Connection(server, key)
    while True:
        busy_clients.seq_id += 1
        step = {"model_id": busy_clients.model_id, "seq_id": busy_clients.seq_id, "adam_params": {}}
        status, _ = await connection.send("/api/v1/optim_step", step)
        if status == 429 or busy_clients.seq_id > 1000:
            busy_clients.seq_id -= status == 429
            await asyncio.sleep(0.1)


async def measure_growth(server: Server, num_jobs: int) -> list[Row]:
    """Latency at the end against the beginning; file size at the end against three fifths.

    The newest ten thousand fetched jobs are kept, so a store grows up to there and no further.
    """
    part = num_jobs // 10
    async with client(server) as mine:
        early = await _many(mine, part)
        await _many(mine, 5 * part)
        early_bytes = server.store_bytes
        await _many(mine, 3 * part)
        late = await _many(mine, part)
        # Housekeeping works in small portions; what counts is where it ends.
        await asyncio.sleep(5.0)
        late_bytes = server.store_bytes
    name = f"after {num_jobs:,} jobs : after"
    return [
        at_most(f"round trip p50 {name} {part:,}", *_pair(late, early, 0.5), "ms", 1.25),
        at_most(f"store size {name} {6 * part:,}", late_bytes / 1e6, early_bytes / 1e6, "MB", 1.25),
    ]


async def _many(mine: Client, num_jobs: int) -> list[float]:
    return [await mine.round_trip() for _ in range(num_jobs)]


def main(num_growth: int = NUM_GROWTH) -> list[Row]:
    """All of it, each part with a fresh server."""
    with serve() as server:
        rows = asyncio.run(measure_trips(server))
    with serve(TINKEX_FAKE_SECONDS=str(BUSY_SECONDS)) as server:
        rows += asyncio.run(measure_busy(server))
    with serve() as server:
        rows += asyncio.run(measure_growth(server, num_growth))
    return rows


if __name__ == "__main__":
    from benchmarks.__main__ import print_table

    print_table(main(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_GROWTH))
