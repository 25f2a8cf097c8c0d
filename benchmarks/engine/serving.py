"""Measurements through HTTP: a server in its own processes, called by the SDK.

This process only waits while the server computes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

import tinkex
from benchmarks.engine import workloads
from benchmarks.engine.baseline import collate
from benchmarks.engine.figures import Figure, Turns, agreement, take_turns
from benchmarks.engine.ours import ADAM, MODEL, datum, make_pass
from benchmarks.engine.shapes import RANK, THREADS
from benchmarks.engine.stage import Stage
from tinkex import Datum, TrainingClient

ROUND_TRIP_LIMIT, OVERHEAD_LIMIT = 1.3, 1.1
ROUND_TRIP_TOKENS = 16
NUM_TRIPS = 16
LOOP_EXAMPLES, LOOP_TOKENS, LOOP_STEPS = 8, 64, 6
SNAPSHOT_LIMIT = 1.05
#: Short passes make the cost of a snapshot visible; with default settings a turn has one.
SNAPSHOT_EXAMPLES, SNAPSHOT_TOKENS, SNAPSHOT_STEPS = 4, 32, 25
NUM_SNAPSHOT_TURNS = 3
NO_SNAPSHOTS = {"TINKEX_SNAPSHOT_CHANGES": "1000000000", "TINKEX_SNAPSHOT_SECONDS": "1000000000"}


@contextmanager
def serve(folder: Path, **settings: str) -> Iterator[tinkex.ServiceClient]:
    """Run a server of one model and yield a client; settings are environment variables."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "tinkex", "serve", "--engine", "local", "--port", "0"]
        variables = {"TINKEX_LOG": "error", "TINKEX_THREADS": str(THREADS), "TINKER_TELEMETRY": "0"}
        process = subprocess.Popen(
            [*command, "--home", home, "--model", f"{MODEL}={folder}"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables | settings,
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            key = (Path(home) / "key").read_text().strip()
            config = tinkex.Config.new(base_url=url, api_key=key)
            with tinkex.ServiceClient(config=config) as service:
                yield service
        finally:
            process.terminate()
            process.communicate()


def measure_serving(stage: Stage) -> list[Figure]:
    """Measure the round trip of one short pass, and a loop against the bare engine."""
    name = "served"
    # The server's adapters have the same seed and therefore the same initial weights.
    stage.adapter(name, seed=1)
    with serve(stage.folder) as service:
        trips, loop = (
            service.create_lora_training_client(MODEL, rank=RANK, seed=1) for _ in range(2)
        )
        return [_round_trip(stage, trips, name), _overhead(stage, loop, name)]


def _round_trip(stage: Stage, client: TrainingClient, name: str) -> Figure:
    rng = np.random.default_rng(9)
    example = workloads.example(rng, stage.shape.vocab_size, ROUND_TRIP_TOKENS)
    data, batch = [datum(example)], collate([example])

    def ours() -> float:
        return client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]

    def theirs() -> float:
        return stage.peft.forward_backward(batch)

    ours()
    theirs()
    turns = take_turns(
        lambda turn: [_timed(ours) for _ in range(NUM_TRIPS)],
        lambda turn: [_timed(theirs) for _ in range(NUM_TRIPS)],
        1,
    )
    stage.peft.clear(name)
    before, after = (median(seconds for seconds, _ in each) for each in turns.baseline_results)
    ours_turn = turns.our_results[0]
    baseline = (before + after) / 2
    return Figure(
        name=f"{ROUND_TRIP_TOKENS}-token forward_backward through HTTP : in-process PEFT",
        model=stage.shape.name,
        ours=1000 * median(seconds for seconds, _ in ours_turn),
        baseline=1000 * baseline,
        unit="ms",
        limit=ROUND_TRIP_LIMIT,
        is_less_better=True,
        spread=abs(before - after) / baseline,
        proof=agreement([ours_turn[0][1]], [turns.baseline_results[0][0][1]]),
    )


def _timed(call: Callable[[], float]) -> tuple[float, float]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def _overhead(stage: Stage, client: TrainingClient, name: str) -> Figure:
    rng = np.random.default_rng(10)
    size = stage.shape.vocab_size
    batches = [
        [workloads.example(rng, size, LOOP_TOKENS) for _ in range(LOOP_EXAMPLES)]
        for _ in range(LOOP_STEPS)
    ]
    passes = [make_pass(name, examples) for examples in batches]
    data = [[datum(example) for example in examples] for examples in batches]

    def bare(turn: int) -> list[float]:
        losses = []
        for each in passes:
            losses += stage.ours.forward_backward([each])
            stage.ours.optim_step(name)
        return losses

    turns = take_turns(lambda turn: _loop(client, data), bare, 2)
    title = f"SDK loop of {LOOP_EXAMPLES} x {LOOP_TOKENS} tokens through HTTP : bare engine"
    return _per_step(title, stage, turns, LOOP_STEPS, OVERHEAD_LIMIT)


def measure_snapshots(stage: Stage) -> list[Figure]:
    """Measure the same loop on a server with default snapshots and on one without."""
    rng = np.random.default_rng(11)
    size = stage.shape.vocab_size
    data = [
        [datum(workloads.example(rng, size, SNAPSHOT_TOKENS)) for _ in range(SNAPSHOT_EXAMPLES)]
        for _ in range(SNAPSHOT_STEPS)
    ]

    with (
        serve(stage.folder) as with_snapshots,
        serve(stage.folder, **NO_SNAPSHOTS) as without_snapshots,
    ):
        clients = [
            service.create_lora_training_client(MODEL, rank=RANK, seed=1)
            for service in (with_snapshots, without_snapshots)
        ]
        turns = take_turns(
            lambda turn: _loop(clients[0], data),
            lambda turn: _loop(clients[1], data),
            NUM_SNAPSHOT_TURNS,
        )
    title = f"training of {SNAPSHOT_STEPS} steps with a snapshot : without"
    return [_per_step(title, stage, turns, SNAPSHOT_STEPS, SNAPSHOT_LIMIT)]


def _loop(client: TrainingClient, data: Sequence[Sequence[Datum]]) -> list[float]:
    """Run a training loop with one step per batch; returns the losses."""
    losses = []
    for examples in data:
        # Both requests are sent before waiting, as in typical training loops.
        forward_backward = client.forward_backward(list(examples), "cross_entropy")
        optim_step = client.optim_step(ADAM)
        losses.append(forward_backward.result().metrics["loss:sum"])
        optim_step.result()
    return losses


def _per_step(name: str, stage: Stage, turns: Turns, num_steps: int, limit: float) -> Figure:
    return Figure(
        name=name,
        model=stage.shape.name,
        ours=1000 * turns.our_seconds / num_steps,
        baseline=1000 * turns.baseline_seconds / num_steps,
        unit="ms/step",
        limit=limit,
        is_less_better=True,
        spread=turns.spread,
        proof=agreement(turns.our_results[0], turns.baseline_results[0]),
    )
