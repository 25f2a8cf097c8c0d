"""How long a checkpoint blocks training, compared with a plain torch.save."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.engine.figures import Figure
from benchmarks.pipeline import ours
from benchmarks.pipeline.timeline import Timeline
from benchmarks.pipeline.workload import Workload

SAVE_INTERVAL = 4


def measure_saving(workload: Workload, is_quick: bool) -> Sequence[Figure]:
    """Measure the additional gap between updates when a step is saved.

    A gap includes the time that the next update waits before it may change the weights.
    """
    num_saves = 3 if is_quick else 5
    num_updates = SAVE_INTERVAL * num_saves + 1
    stage = workload.pretrain(num_blocks=num_updates, batch_size=1)
    before = [_plain_save(stage, workload) for _ in range(3)]
    timeline = ours.run(stage, num_updates=num_updates, save_interval=SAVE_INTERVAL)
    seconds = [*before, *(_plain_save(stage, workload) for _ in range(3))]
    blocked = _gaps(timeline, is_saved=True)
    baseline = median(_gaps(timeline, is_saved=False))
    slowed = _slowing(timeline)
    proof = f"first save {1000 * blocked[0]:.0f} ms, in new memory; torch.save does not sync"
    return [
        _figure("a save blocks training for", median(blocked) - baseline, seconds, 0.25, proof),
        _figure("  and slows concurrent updates by", slowed, seconds, None, "writer thread"),
    ]


def _figure(
    name: str, mine: float, seconds: Sequence[float], limit: float | None, proof: str
) -> Figure:
    return Figure(
        name=name,
        model="",
        ours=1000.0 * mine,
        baseline=1000.0 * median(seconds),
        unit="ms",
        limit=limit,
        is_less_better=True,
        proof=proof,
    )


def _gaps(timeline: Timeline, *, is_saved: bool) -> list[float]:
    pairs = zip(timeline.gaps, timeline.waits[1:], strict=True)
    numbered = enumerate((gap + wait for gap, wait in pairs), start=1)
    return [gap for step, gap in numbered if (step % SAVE_INTERVAL == 0) == is_saved]


def _slowing(timeline: Timeline) -> float:
    """Return how much longer the updates between two saves take than without a concurrent write.

    The last update before the next save is the reference: by then the writer is idle.
    """
    spans = [end - begin for begin, end in zip(timeline.begins, timeline.ends, strict=True)]
    blocks = [
        spans[start : start + SAVE_INTERVAL]
        for start in range(SAVE_INTERVAL, len(spans) - SAVE_INTERVAL + 1, SAVE_INTERVAL)
    ]
    return max(0.0, median(sum(block) - SAVE_INTERVAL * block[-1] for block in blocks))


def _plain_save(stage: Any, workload: Workload) -> float:
    """Return the seconds of torch.save for the model and an AdamW state."""
    optimizer = torch.optim.AdamW(stage.model.parameters())
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
    content = {"model": stage.model.state_dict(), "optimizer": optimizer.state_dict()}
    path = workload.folder / "plain.pt"
    started = time.perf_counter()
    torch.save(content, path)
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds
