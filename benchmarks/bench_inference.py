"""The inference endpoints with tinkex/tiny: throughput, time to the first token, many streams.

Clients are bare sockets in this process. Throughput is a ratio to the native protocol: both sides
run in turns on one server, with the same prompts and seeds, so that they generate the same tokens.
`--quick` measures one short round of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import Row, at_least, at_most
from benchmarks.bench_server import Connection, Server, new_key
from tinkex.engine.config import EngineConfig
from tinkex.engine.protocol import SamplerSource
from tinkex.engine.torch_engine import TorchEngine
from tinkex.models import TINY, TINY_FOLDER
from tinkex.types import ModelInput, SampleRequest, SamplingParams

PROMPT_TOKENS, LONG_PROMPT_TOKENS = 16, 512
MIN_THROUGHPUT, MAX_FIRST_TOKEN, MAX_GROWTH = 0.95, 1.2, 1.1
TIMEOUT_SECONDS = 300.0


class Scale(NamedTuple):
    """How much is measured."""

    num_requests: int = 64
    num_tokens: int = 128
    num_turns: int = 5
    num_first_tokens: int = 20
    num_streams: int = 256
    stream_tokens: int = 128
    num_stream_rounds: int = 4


QUICK = Scale(16, 32, 1, 5, 32, 32, 2)


class Process(NamedTuple):
    """A server, and the id of its first process."""

    server: Server
    pid: int


@contextmanager
def serve() -> Iterator[Process]:
    """`tinkex serve` with tinkex/tiny and one thread."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tinkex", "serve", "--engine", "local", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--home", directory],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TINKEX_LOG": "error", "TINKEX_THREADS": "1"},
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            yield Process(Server(Path(directory), url), process.pid)
        finally:
            process.terminate()
            process.communicate()


def memory_bytes(pid: int) -> int:
    """The resident memory of a process and of all processes that it started."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    own = next((1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS")), 0)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(memory_bytes(int(child)) for child in children)


def prompt_tokens(length: int, seed: int) -> list[int]:
    """Tokens that differ from the start, so that no prefix is cached."""
    return [13 + (31 * seed + 7 * place * (seed + 1)) % 1500 for place in range(length)]


# --- clients -----------------------------------------------------------------------------------
class Caller:
    """Sends samples by the native protocol and completions."""

    def __init__(self, server: Server, key: str) -> None:
        self._server, self._key = server, key

    async def sample_natively(self, tokens: list[int], max_tokens: int, seed: int) -> None:
        """A sample of the native protocol, and its result."""
        connection = Connection(self._server, self._key)
        message = {
            "base_model": TINY,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "sampling_params": {
                "max_tokens": max_tokens,
                "seed": seed,
                "temperature": 1.0,
                "stop": [],
            },
        }
        promise = await connection.call("/api/v1/asample", message)
        question = {"request_id": promise["request_id"], "allow_metadata_only": False}
        status = 408
        while status == 408:
            status, body = await connection.send("/api/v1/retrieve_future", question)
        connection.close()
        if status != 200:
            raise RuntimeError(f"retrieve_future: {status} {body[:300]!r}")

    async def complete(self, tokens: list[int], max_tokens: int, seed: int) -> int:
        """A completion; returns the number of its tokens."""
        connection = Connection(self._server, self._key)
        answer = await connection.call("/v1/completions", _body(tokens, max_tokens, seed))
        connection.close()
        num_tokens: int = answer["usage"]["completion_tokens"]
        return num_tokens

    async def stream(self, tokens: list[int], max_tokens: int, seed: int) -> float | None:
        """A streamed completion; returns the seconds to its first token, if that has a text.

        A token that is a part of a character is sent together with the next one.
        """
        started = time.perf_counter()
        body = _body(tokens, max_tokens, seed) | {"stream": True, "return_token_ids": True}
        first, num_tokens = 0.0, 0
        async for event in self._events(body):
            if not first:
                first = time.perf_counter() - started
                num_tokens = len(event["choices"][0]["token_ids"])
        return first if num_tokens == 1 else None

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            content = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {self._key}\r\n"
            length = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            writer.write((head + length).encode() + content)
            async for line in reader:
                if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                    raise RuntimeError(f"completions: {line!r} {await reader.read(500)!r}")
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
            raise RuntimeError("the stream has ended early")
        finally:
            writer.close()


def _body(tokens: list[int], max_tokens: int, seed: int) -> dict[str, Any]:
    return {
        "model": TINY,
        "prompt": tokens,
        "max_tokens": max_tokens,
        "seed": seed,
        "ignore_eos": True,
    }


Call = Callable[[list[int], int, int], Coroutine[Any, Any, object]]


async def run_all(call: Call, num_requests: int, num_tokens: int) -> tuple[float, list[object]]:
    """Run requests at the same time; returns the seconds that all took, and their results."""
    prompts = [prompt_tokens(PROMPT_TOKENS, seed) for seed in range(num_requests)]
    started = time.perf_counter()
    async with asyncio.timeout(TIMEOUT_SECONDS):
        results = await asyncio.gather(
            *(call(prompt, num_tokens, seed) for seed, prompt in enumerate(prompts))
        )
    return time.perf_counter() - started, list(results)


# --- what is measured --------------------------------------------------------------------------
async def measure_throughput(caller: Caller, scale: Scale) -> list[Row]:
    """Tokens per second of completions, as ratios to the native protocol."""
    seconds: dict[str, list[float]] = {"native": [], "whole": [], "streamed": []}
    calls: dict[str, Call] = {
        "native": caller.sample_natively,
        "whole": caller.complete,
        "streamed": caller.stream,
    }
    _, counts = await run_all(caller.complete, scale.num_requests, scale.num_tokens)
    num_tokens = sum(count for count in counts if isinstance(count, int))
    for _ in range(scale.num_turns):
        for name, call in calls.items():
            took, _ = await run_all(call, scale.num_requests, scale.num_tokens)
            seconds[name].append(took)
    rates = {name: num_tokens / median(times) for name, times in seconds.items()}
    what = f"completions of {scale.num_requests} clients"
    return [
        at_least(f"{what}, {name} : native", rates[name], rates["native"], "tok/s", MIN_THROUGHPUT)
        for name in ("whole", "streamed")
    ]


async def measure_first_token(caller: Caller, scale: Scale) -> list[Row]:
    """The time to the first token of a stream, as ratios to a sample of one token."""
    streamed, native, prefill = [], [], []
    with EnginePrefill() as engine:
        for turn in range(scale.num_first_tokens):
            prompts = [prompt_tokens(LONG_PROMPT_TOKENS, 3 * turn + side) for side in range(3)]
            if seconds := await caller.stream(prompts[0], 8, turn):
                streamed.append(1000.0 * seconds)
            started = time.perf_counter()
            await caller.sample_natively(prompts[1], 1, 1)
            native.append(1000.0 * (time.perf_counter() - started))
            prefill.append(1000.0 * engine.run(prompts[2]))
    what = f"first token of a stream after {LONG_PROMPT_TOKENS} tokens"
    first = median(streamed)
    return [
        at_most(f"{what} : a native sample of one", first, median(native), "ms", MAX_FIRST_TOKEN),
        at_most(f"{what} : prefill in this process", first, median(prefill), "ms", MAX_FIRST_TOKEN),
    ]


class EnginePrefill:
    """Computes prompts with the engine in this process, without a server."""

    def __enter__(self) -> EnginePrefill:
        self._engine = TorchEngine({TINY: str(TINY_FOLDER)}, EngineConfig(threads=1))
        self.run(prompt_tokens(LONG_PROMPT_TOKENS, 999))
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def run(self, tokens: list[int]) -> float:
        """The seconds of a prompt and its next token."""
        request = SampleRequest(
            prompt=ModelInput.from_ints(tokens), sampling_params=SamplingParams(max_tokens=1)
        )
        started = time.perf_counter()
        self._engine.start_sample("prefill", SamplerSource(base_model=TINY), request)
        while not self._engine.step_samples():
            pass
        return time.perf_counter() - started


async def measure_streams(caller: Caller, pid: int, scale: Scale) -> list[Row]:
    """The memory of the server's processes while and after many streams are open."""
    before = memory_bytes(pid)
    after = []
    for _ in range(scale.num_stream_rounds):
        await run_all(caller.stream, scale.num_streams, scale.stream_tokens)
        after.append(memory_bytes(pid))
    what = f"memory after {scale.num_streams} streams"
    mib = 2.0**20
    return [
        at_most(f"{what} : before any", after[0] / mib, before / mib, "MiB"),
        at_most(
            f"{what}, {len(after)} times : once", after[-1] / mib, after[0] / mib, "MiB", MAX_GROWTH
        ),
    ]


async def measure(process: Process, scale: Scale) -> list[Row]:
    """All of it, on one server."""
    caller = Caller(process.server, new_key(process.server, "inference"))
    rows = await measure_throughput(caller, scale)
    rows += await measure_first_token(caller, scale)
    return rows + await measure_streams(caller, process.pid, scale)


def main(options: Sequence[str] = ()) -> list[Row]:
    """Rows for the common table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks inference", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure one short round of each")
    asked = parser.parse_args(list(options))
    with serve() as process:
        return asyncio.run(measure(process, QUICK if asked.quick else Scale()))


if __name__ == "__main__":
    from benchmarks.__main__ import print_table

    print_table(main(sys.argv[1:]))
