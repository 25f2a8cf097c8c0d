"""Several workers: throughput of two against one, and the cost and balance of placement at scale.

Two servers are measured in turn, with one and with two workers of one thread each. Placement is
simulated with the functions that the server uses. `--quick` measures one round.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import Row, at_least, at_most
from benchmarks.engine.ours import ADAM, MODEL, datum
from benchmarks.engine.serving import serve
from benchmarks.engine.shapes import RANK, SMALL, write_model
from benchmarks.engine.workloads import Example
from tinkex import ModelInput, SamplingClient, SamplingParams, ServiceClient, TrainingClient
from tinkex.jobs.groups import GroupView, Placement

NUM_RUNS, NUM_STEPS = 8, 4
NUM_EXAMPLES, EXAMPLE_TOKENS = 4, 128
PROMPT_TOKENS, SAMPLE_TOKENS = 16, 16
NUM_ROUNDS = 3
#: Size of the simulated cluster.
NUM_GROUPS, NUM_PLACED, NUM_SOURCES = 1_000, 100_000, 20_000


async def _train_and_sample(client: TrainingClient, sampler: SamplingClient) -> None:
    tokens = list(range(5, 5 + EXAMPLE_TOKENS))
    example = datum(Example(tokens, tokens, num_prompt=0))
    params = SamplingParams(max_tokens=SAMPLE_TOKENS, stop=[])
    prompt = ModelInput.from_ints(tokens[:PROMPT_TOKENS])
    for _ in range(NUM_STEPS):
        passed = await client.forward_backward_async([example] * NUM_EXAMPLES, "cross_entropy")
        stepped = await client.optim_step_async(ADAM)
        await sampler.sample_async(prompt, 1, params)
        await passed
        await stepped


async def measure_rate(service: ServiceClient) -> float:
    """Return the tokens per second of all runs together."""
    clients = [service.create_lora_training_client(MODEL, rank=RANK) for _ in range(NUM_RUNS)]
    samplers = [service.create_sampling_client(base_model=MODEL) for _ in range(NUM_RUNS)]
    await asyncio.gather(*map(_warm_up, clients))
    started = time.perf_counter()
    await asyncio.gather(*map(_train_and_sample, clients, samplers))
    seconds = time.perf_counter() - started
    step_tokens = NUM_EXAMPLES * EXAMPLE_TOKENS + PROMPT_TOKENS + SAMPLE_TOKENS
    return NUM_RUNS * NUM_STEPS * step_tokens / seconds


async def _warm_up(client: TrainingClient) -> None:
    example = datum(Example([5, 6], [6, 7], num_prompt=0))
    await (await client.forward_backward_async([example], "cross_entropy"))


def measure_workers(num_rounds: int) -> Row:
    """Compare two workers with one."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as directory:
        folder = write_model(SMALL, Path(directory) / "model")
        for num_workers in [*rates] * num_rounds:
            settings = {"TINKEX_WORKERS": str(num_workers), "TINKEX_THREADS": "1"}
            with serve(folder, **settings) as service:
                rates[num_workers].append(asyncio.run(measure_rate(service)))
    one, two = median(rates[1]), median(rates[2])
    return at_least(f"{NUM_RUNS} runs on 2 workers : on 1", two, one, "tokens/s", 1.8)


def simulate_placement() -> list[Row]:
    """Place models and samples in a large cluster, and lose a group."""
    groups = [GroupView(f"group-{number:04}", frozenset({MODEL})) for number in range(NUM_GROUPS)]
    runs = {f"run-{number}": MODEL for number in range(NUM_PLACED)}
    started = time.perf_counter()
    placed = Placement(groups).place_runs(runs)
    plan_seconds = time.perf_counter() - started
    counts = [len(placed.get(group.id, [])) for group in groups]
    mean = NUM_PLACED / NUM_GROUPS

    placement = Placement(groups)
    started = time.perf_counter()
    for number in range(1000):
        placement.place_run(f"new-{number}", MODEL)
    run_seconds = (time.perf_counter() - started) / 1000

    sources = [f"source-{number}" for number in range(NUM_SOURCES)]
    before = {source: placement.place_sample(source, MODEL) for source in sources[:1000]}
    started = time.perf_counter()
    for source in before:
        placement.place_sample(source, MODEL)
    sample_seconds = (time.perf_counter() - started) / len(before)

    lost, *others = groups
    num_lost_samples = sum(group == lost.id for group in before.values())
    smaller = Placement(others)
    after = {source: smaller.place_sample(source, MODEL) for source in before}
    num_moved = sum(after[source] != before[source] for source in before)
    hot = Counter(placement.place_sample(source, MODEL) for source in sources)
    return [
        at_most(f"models on the fullest of {NUM_GROUPS} groups : mean", max(counts), mean, "", 1.1),
        at_most("placing a model : 20 us", run_seconds * 1e6, 20.0, "us", 1.0),
        at_most("placing a sample : 20 us", sample_seconds * 1e6, 20.0, "us", 1.0),
        at_most(f"planning {NUM_PLACED:,} models : 200 ms", plan_seconds * 1e3, 200.0, "ms", 1.0),
        at_most(
            "sampling sessions on the fullest group : mean",
            max(hot.values()),
            NUM_SOURCES / NUM_GROUPS,
            "",
        ),
        Row(
            "sessions that move when a group is lost",
            f"{num_moved} of {len(before)}",
            f"{num_lost_samples} were there",
            num_moved / max(1, num_lost_samples),
            "== its own",
            num_moved == num_lost_samples,
        ),
    ]


def main(options: Sequence[str] = ()) -> list[Row]:
    """Rows for the common table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks groups", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure one round")
    asked = parser.parse_args(list(options))
    return [*simulate_placement(), measure_workers(1 if asked.quick else NUM_ROUNDS)]
