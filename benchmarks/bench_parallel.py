"""Several ranks: training one model on two ranks against one, with one thread each.

Two servers are measured in turn. The batches are large; for small ones, ranks do not pay.
`--quick` measures one round.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import Row, at_least
from benchmarks.engine.ours import ADAM, MODEL, datum
from benchmarks.engine.serving import serve
from benchmarks.engine.shapes import RANK, SMALL, write_model
from benchmarks.engine.workloads import Example
from tinkex import Datum, ServiceClient

NUM_EXAMPLES, MIN_TOKENS, MAX_TOKENS = 64, 64, 192
NUM_STEPS = 2
NUM_ROUNDS = 3


def make_batch() -> list[Datum]:
    """Examples of many lengths."""
    rng = np.random.default_rng(1)
    batch = []
    for length in rng.integers(MIN_TOKENS, MAX_TOKENS + 1, NUM_EXAMPLES):
        tokens = rng.integers(5, SMALL.vocab_size, int(length) + 1).tolist()
        batch.append(datum(Example(tokens[:-1], tokens[1:], num_prompt=0)))
    return batch


async def _measure(service: ServiceClient) -> float:
    """Return the tokens per second of one model."""
    client = await service.create_lora_training_client_async(MODEL, rank=RANK)
    batch = make_batch()
    await (await client.forward_backward_async(batch[:16], "cross_entropy"))
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        passed = await client.forward_backward_async(batch, "cross_entropy")
        stepped = await client.optim_step_async(ADAM)
        await passed
        await stepped
    num_tokens = sum(each.model_input.length for each in batch)
    return NUM_STEPS * num_tokens / (time.perf_counter() - started)


def measure_ranks(num_rounds: int) -> Row:
    """Compare two ranks with one."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as directory:
        folder = write_model(SMALL, Path(directory) / "model")
        for num_ranks in [*rates] * num_rounds:
            settings = {"TINKEX_RANKS": str(num_ranks), "TINKEX_THREADS": "1"}
            with serve(folder, **settings) as service:
                rates[num_ranks].append(asyncio.run(_measure(service)))
    one, two = median(rates[1]), median(rates[2])
    return at_least("training one model on 2 ranks : on 1", two, one, "tokens/s", 1.7)


def main(options: Sequence[str] = ()) -> list[Row]:
    """Rows for the common table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks parallel", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure one round")
    asked = parser.parse_args(list(options))
    return [measure_ranks(1 if asked.quick else NUM_ROUNDS)]
