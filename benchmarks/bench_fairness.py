"""What one tenant's work costs another: latency beside a long pass and beside a flood of samples.

Clients are bare sockets in this process. Every figure is a ratio between two situations of the same
run: with the other work and without it. `--quick` takes a third of the tokens.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import Row, at_most
from benchmarks.bench_server import Connection, Server, new_key
from tinkex.engine.config import EngineConfig
from tinkex.models import built_in

MODEL, OTHER_MODEL = "tinkex/tiny", "benchmark/other"
EXAMPLE_TOKENS = 256
NUM_TRIPS = 15
FLOOD_SAMPLES, FLOOD_TOKENS = 400, 32
BURST_SAMPLES, BURST_TOKENS = 200, 64
#: Twice the lone time plus one micro-batch is what was promised.
LONE_FACTOR = 2.0


class Scale(NamedTuple):
    """How much is measured."""

    pass_tokens: int = 100_000
    num_rounds: int = 3


@contextmanager
def serve(workers: str = "1") -> Iterator[Server]:
    """`tinkex serve` with the small model of the package under two names."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tinkex", "serve", "--engine", "local", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--home", directory, "--model", f"{OTHER_MODEL}={built_in()[MODEL]}"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"TINKEX_LOG": "error", "TINKEX_THREADS": "1", "TINKEX_WORKERS": workers},
        )
        try:
            assert process.stdout is not None
            yield Server(Path(directory), process.stdout.readline().split()[-1])
        finally:
            process.terminate()
            process.communicate()


class Tenant:
    """A tenant with one model, on one connection."""

    def __init__(self, server: Server, key: str) -> None:
        self._server, self._key = server, key
        self.connection = Connection(server, key)
        self.model_id = ""
        self._seq_id = 0

    async def open(self) -> None:
        """Open a session, and make a model."""
        opening = {"tags": [], "user_metadata": {}, "sdk_version": "bench"}
        session = await self.connection.call("/api/v1/create_session", opening)
        model = {
            "session_id": session["session_id"],
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": 16},
        }
        promise = await self.connection.call("/api/v1/create_model", model)
        self.model_id = promise["model_id"]
        await self.result(promise["request_id"])

    async def post_pass(self, num_tokens: int) -> str:
        """Start a forward_backward; returns the id of its future."""
        self._seq_id += 1
        full, rest = divmod(num_tokens, EXAMPLE_TOKENS)
        lengths = [EXAMPLE_TOKENS] * full + ([rest] if rest else [])
        work = {"data": [_datum(length) for length in lengths], "loss_fn": "cross_entropy"}
        message = {
            "model_id": self.model_id,
            "seq_id": self._seq_id,
            "forward_backward_input": work,
        }
        promise = await self.connection.call("/api/v1/forward_backward", message)
        request_id: str = promise["request_id"]
        return request_id

    async def run_pass(self, num_tokens: int = 16) -> None:
        """A forward_backward, and its result."""
        await self.result(await self.post_pass(num_tokens))

    async def sample(self, max_tokens: int = 8, model: str = MODEL) -> None:
        """A sample that is not stopped before, and its result."""
        message = {
            "base_model": model,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(5, 21))}]},
            "sampling_params": {"max_tokens": max_tokens, "stop": [], "temperature": 1.0},
        }
        promise = await self.connection.call("/api/v1/asample", message)
        await self.result(promise["request_id"])

    async def result(self, request_id: str) -> None:
        """Poll until there is a result."""
        question = {"request_id": request_id, "allow_metadata_only": False}
        status = 408
        while status == 408:
            status, body = await self.connection.send("/api/v1/retrieve_future", question)
        if status != 200 or (body.startswith(b"{") and "error" in json.loads(body)):
            raise RuntimeError(f"retrieve_future: {status} {body[:300]!r}")

    @asynccontextmanager
    async def flooding(
        self, num_samples: int, max_tokens: int
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Have many samples at once; ends when all are done."""
        clones = [Tenant(self._server, self._key) for _ in range(num_samples)]
        tasks = [asyncio.create_task(each.sample(max_tokens)) for each in clones]
        flood = asyncio.create_task(_all_of(tasks))
        try:
            yield flood
        finally:
            await flood
            for each in clones:
                each.connection.close()


async def _all_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


def _datum(length: int) -> dict[str, Any]:
    tokens = [5 + 7 * place % 150 for place in range(length)]
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens, "dtype": "int64", "shape": [length]},
            "weights": {"data": [1.0] * length, "dtype": "float32", "shape": [length]},
        },
    }


async def timed(call: Awaitable[None]) -> float:
    """How many milliseconds a call takes."""
    started = time.perf_counter()
    await call
    return 1000.0 * (time.perf_counter() - started)


async def repeated(
    call: Callable[[], Awaitable[None]], is_over: Callable[[], bool] = lambda: False
) -> list[float]:
    """The times of calls one after the other, as long as the other work goes on."""
    times = []
    while len(times) < NUM_TRIPS and not is_over():
        times.append(await timed(call()))
    return times


# --- what is measured --------------------------------------------------------------------------
async def measure_long_pass(heavy: Tenant, light: Tenant, scale: Scale) -> list[Row]:
    """A sample and a pass of one tenant while another tenant's long pass runs."""
    step_tokens = EngineConfig().micro_batch_tokens
    await heavy.run_pass(step_tokens)
    num_steps = 8
    step_ms = await timed(heavy.run_pass(num_steps * step_tokens)) / num_steps
    rows = []
    for name, call in (("sample", light.sample), ("pass", light.run_pass)):
        await call()
        alone = await repeated(call)
        request_id = await heavy.post_pass(scale.pass_tokens)
        running = asyncio.create_task(heavy.result(request_id))
        await asyncio.sleep(0.5)
        beside = await repeated(call, running.done)
        await running
        what = f"small {name} beside a pass of {scale.pass_tokens:,} tokens : 2 x alone + step"
        promised = LONE_FACTOR * median(alone) + step_ms
        rows.append(at_most(what, median(beside), promised, "ms", 1.0))
        rows.append(at_most("  slowest : 2 x alone + step", max(beside), promised, "ms"))
        rows.append(at_most("  : alone", median(beside), median(alone), "ms"))
    rows.append(
        at_most(f"a step of {step_tokens:,} tokens : small pass", step_ms, median(alone), "ms")
    )
    return rows


async def measure_flood(busy: Tenant, light_tenant: Tenant, scale: Scale) -> list[Row]:
    """A quiet tenant's samples, with and without a flood of another tenant's."""
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(scale.num_rounds):
        alone += await repeated(lambda: light_tenant.sample(FLOOD_TOKENS))
        async with busy.flooding(FLOOD_SAMPLES, FLOOD_TOKENS) as flood:
            await asyncio.sleep(0.5)
            beside += await repeated(lambda: light_tenant.sample(FLOOD_TOKENS), flood.done)
    name = f"a quiet tenant's sample beside {FLOOD_SAMPLES} x {FLOOD_TOKENS} : alone"
    return [at_most(name, median(beside), median(alone), "ms", LONE_FACTOR)]


async def measure_models(tenant: Tenant, clone: Tenant) -> list[Row]:
    """A sample of another base model of the same tenant, beside a burst."""

    async def sample() -> None:
        await clone.sample(4, OTHER_MODEL)

    await sample()
    alone = await repeated(sample)
    async with tenant.flooding(BURST_SAMPLES, BURST_TOKENS) as burst:
        await asyncio.sleep(0.5)
        beside = await repeated(sample, burst.done)
    name = f"4 tokens of another model beside {BURST_SAMPLES} x {BURST_TOKENS} : alone"
    return [at_most(name, median(beside), median(alone), "ms")]


async def measure(server: Server, scale: Scale) -> list[Row]:
    """All of it, on one server."""
    tenants = [Tenant(server, new_key(server, name)) for name in ("heavy", "light", "heavy")]
    heavy, light, clone = tenants
    for tenant in (heavy, light):
        await tenant.open()
    rows = await measure_long_pass(heavy, light, scale)
    rows += await measure_flood(heavy, light, scale)
    rows += await measure_models(heavy, clone)
    for tenant in tenants:
        tenant.connection.close()
    return rows


def main(options: Sequence[str] = ()) -> list[Row]:
    """Rows for the common table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fairness", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="take a third of the tokens")
    parser.add_argument("--workers", default="1", help="workers of the server")
    asked = parser.parse_args(list(options))
    scale = Scale(pass_tokens=33_000, num_rounds=1) if asked.quick else Scale()
    with serve(asked.workers) as server:
        return asyncio.run(measure(server, scale))


if __name__ == "__main__":
    from benchmarks.__main__ import print_table

    print_table(main(sys.argv[1:]))
