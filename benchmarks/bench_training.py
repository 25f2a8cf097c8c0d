"""Pipelined training steps of 64 examples with 2,048 tokens each: steps per second and CPU."""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from statistics import median
from typing import Any

from benchmarks import (
    BASE_MODEL,
    NUM_TRAINED_TOKENS,
    SIDES,
    Row,
    at_least,
    at_most,
    medians,
    run_against_server,
)

ROUNDS = 3
NUM_STEPS = 8
NUM_EXAMPLES = 64


def main() -> list[Row]:
    """Rows for a training loop that sends everything before it waits for anything."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(ROUNDS):
        for side, package in SIDES.items():
            runs[side].append(run_against_server("bench_training", package))
    ours, official = medians(runs["ours"]), medians(runs["official"])
    name = f"training steps of {NUM_EXAMPLES} x {NUM_TRAINED_TOKENS:,} tokens"
    return [
        at_least(name, ours["per_second"], official["per_second"], "/s"),
        at_most("  client CPU per step", ours["cpu_ms"], official["cpu_ms"], "ms"),
        at_most("  time a call keeps its caller", ours["call_ms"], official["call_ms"], "ms"),
        at_most("  peak memory of the client", ours["rss_mb"], official["rss_mb"], "MB"),
    ]


def measure(package: str) -> dict[str, float]:
    """One side, in its own process; the server and the key come from the environment."""
    tinker = importlib.import_module(package)
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(BASE_MODEL, rank=8)
    data = [make_datum(tinker, first) for first in range(NUM_EXAMPLES)]
    adam = tinker.AdamParams(learning_rate=1e-3)
    training.forward_backward(data, "cross_entropy").result()
    training.optim_step(adam).result()
    cpu_before, started = time.process_time(), time.perf_counter()
    futures: list[Any] = []
    blocked: list[float] = []
    for _ in range(NUM_STEPS):
        called = time.perf_counter()
        futures.append(training.forward_backward(data, "cross_entropy"))
        blocked.append(time.perf_counter() - called)
        futures.append(training.optim_step(adam))
    for future in futures:
        future.result()
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_before
    service.close("success").result()
    return {
        "per_second": NUM_STEPS / seconds,
        "cpu_ms": 1000 * cpu_seconds / NUM_STEPS,
        "call_ms": 1000 * median(blocked),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0,
    }


def make_datum(tinker: Any, first: int) -> Any:
    tokens = [(first + 7 * index) % 500 for index in range(NUM_TRAINED_TOKENS + 1)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * NUM_TRAINED_TOKENS},
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        for row in main():
            print(*row, sep=" | ")
