"""2,000 small samples at once: throughput, CPU and memory of the client process."""

from __future__ import annotations

import asyncio
import importlib
import json
import resource
import sys
import time
from typing import Any

from benchmarks import (
    BASE_MODEL,
    NUM_SAMPLED_TOKENS,
    SIDES,
    Row,
    at_least,
    at_most,
    medians,
    run_against_server,
)

ROUNDS = 3
NUM_SAMPLES = 2000


def main() -> list[Row]:
    """Rows for many concurrent samples against a server in another process."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(ROUNDS):
        for side, package in SIDES.items():
            runs[side].append(run_against_server("bench_sampling", package))
    ours, official = medians(runs["ours"]), medians(runs["official"])
    name = f"{NUM_SAMPLES:,} concurrent samples"
    return [
        at_least(name, ours["per_second"], official["per_second"], "/s", 2.0),
        at_most("  client CPU per sample", ours["cpu_us"], official["cpu_us"], "us"),
        at_most("  peak memory of the client", ours["rss_mb"], official["rss_mb"], "MB", 0.5),
    ]


async def measure(package: str) -> dict[str, float]:
    """One side, in its own process; the server and the key come from the environment."""
    tinker = importlib.import_module(package)
    service = tinker.ServiceClient()
    sampler = await service.create_sampling_client_async(base_model=BASE_MODEL)
    prompt = tinker.ModelInput.from_ints(list(range(32)))
    params = tinker.SamplingParams(max_tokens=NUM_SAMPLED_TOKENS, temperature=1.0)
    await asyncio.gather(*(sampler.sample_async(prompt, 1, params) for _ in range(20)))
    cpu_before, started = time.process_time(), time.perf_counter()
    answers = await asyncio.gather(
        *(sampler.sample_async(prompt, 1, params) for _ in range(NUM_SAMPLES))
    )
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_before
    if any(len(answer.sequences) != 1 for answer in answers):
        raise RuntimeError("a sample came back without its sequence")
    await service.close("success")
    return {
        "per_second": NUM_SAMPLES / seconds,
        "cpu_us": 1e6 * cpu_seconds / NUM_SAMPLES,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0,
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(asyncio.run(measure(sys.argv[1]))))
    else:
        for row in main():
            print(*row, sep=" | ")
