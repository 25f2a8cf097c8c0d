"""Peak memory of a training step with a large vocabulary, each side in its own process.

`python -m benchmarks.engine.memory ours FOLDER VOCABULARY` prints the figures of one side.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch

from benchmarks import run_json
from benchmarks.engine import workloads
from benchmarks.engine.figures import Figure, agreement
from benchmarks.engine.process_memory import peak_of, rss_bytes, settle
from benchmarks.engine.shapes import THREADS, Shape, write_model
from benchmarks.engine.workloads import Example

LIMIT = 0.5
SIDES = ("ours", "baseline")
NAME = "memory"
Step: TypeAlias = Callable[[list[Example]], float]


def measure_memory(shape: Shape) -> Figure:
    """Measure the peak above the memory before the step."""
    with TemporaryDirectory() as directory:
        folder = write_model(shape, Path(directory) / "model")
        # Ours runs first, because it saves the adapter that both start from.
        ours, baseline = (_run_side(side, folder, shape) for side in SIDES)
    held = " : ".join(f"{each['held_mb']:,.0f}" for each in (ours, baseline))
    return Figure(
        name=f"peak memory of a training step, vocabulary {shape.vocab_size}",
        model=shape.name,
        ours=ours["peak_mb"],
        baseline=baseline["peak_mb"],
        unit="MB",
        limit=LIMIT,
        is_less_better=True,
        proof=f"{agreement([ours['loss']], [baseline['loss']])}; {held} MB held before the step",
    )


def _run_side(side: str, folder: Path, shape: Shape) -> dict[str, Any]:
    module = "benchmarks.engine.memory"
    command = [sys.executable, "-m", module, side, str(folder), str(shape.vocab_size)]
    return run_json(command, OMP_NUM_THREADS=str(THREADS))


def measure_side(side: str, folder: Path, vocab_size: int) -> dict[str, float]:
    """Measure a step on a batch of 8, after a short step that allocates persistent buffers."""
    torch.set_num_threads(THREADS)
    (batch,) = workloads.sft_batches(0, 1, vocab_size)
    (short, *_) = workloads.sft_batches(1, 1, vocab_size)[0]
    adapter = folder.with_name("adapter")
    step = _our_step(folder, adapter) if side == "ours" else _their_step(folder, adapter)
    step([short])
    settle()
    held = rss_bytes()
    losses: list[float] = []
    peak = peak_of(lambda: losses.append(step(batch)))
    return {"peak_mb": peak / 1e6, "held_mb": held / 1e6, "loss": losses[0]}


# Each process imports only its own side.
def _our_step(folder: Path, adapter: Path) -> Step:
    from benchmarks.engine.ours import Ours, make_pass

    ours = Ours(folder)
    ours.create(NAME, adapter, seed=1)

    def step(examples: list[Example]) -> float:
        (loss,) = ours.forward_backward([make_pass(NAME, examples)])
        ours.optim_step(NAME)
        return loss

    return step


def _their_step(folder: Path, adapter: Path) -> Step:
    from benchmarks.engine.baseline import Peft, collate

    peft = Peft(folder)
    peft.load(NAME, adapter)

    def step(examples: list[Example]) -> float:
        loss = peft.forward_backward(collate(examples))
        peft.optim_step(NAME)
        return loss

    return step


if __name__ == "__main__":
    print(json.dumps(measure_side(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
