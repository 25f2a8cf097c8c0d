"""Tokens per second of pretraining on full blocks and of fine-tuning on mixed lengths."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.engine.figures import Figure, agreement, take_turns
from benchmarks.pipeline import hf_trainer, ours
from benchmarks.pipeline.timeline import Timeline
from benchmarks.pipeline.workload import SEED, SEQ_LEN, Workload, flops_per_token

BATCH_SIZE = 4
CHATS_PER_BATCH = 8
PEAK_SIZE = 2048


def measure_pretrain(workload: Workload, is_quick: bool) -> Sequence[Figure]:
    """Measure pretraining on full blocks, without padding on either side."""
    num_updates, num_rounds = (3, 2) if is_quick else (4, 3)
    stage = workload.pretrain(num_blocks=BATCH_SIZE * num_updates, batch_size=BATCH_SIZE)
    model, rows = copy.deepcopy(stage.model), hf_trainer.rows_of(stage, num_updates)
    peaks: list[float] = []

    def train_ours(_: int) -> Timeline:
        peaks.append(matmul_peak())
        timeline = ours.run(stage, num_updates=num_updates)
        peaks.append(matmul_peak())
        return timeline

    def train_plain(_: int) -> Timeline:
        return hf_trainer.run(model, rows, BATCH_SIZE, num_updates, workload.folder / "plain")

    turns = take_turns(train_ours, train_plain, num_rounds)
    mine = median(one.warm_speed for one in turns.our_results)
    theirs = [one.warm_speed for one in turns.baseline_results]
    spread = (max(theirs) - min(theirs)) / median(theirs)
    gflops = mine * flops_per_token(stage.model, SEQ_LEN) / 1e9
    about = f"{sum(one.numel() for one in stage.model.parameters()) / 1e6:.1f} M weights"
    return [
        Figure(
            name="pretrain, 512 x 8 x 512",
            model="",
            ours=mine,
            baseline=median(theirs),
            unit="tokens/s",
            limit=1.15,
            proof=f"{_same_losses(turns.our_results, turns.baseline_results)}; "
            f"spread of the baseline {spread:.0%}",
        ),
        Figure(
            name="  of the matmul peak",
            model="",
            ours=gflops,
            baseline=median(peaks),
            unit="GFLOP/s",
            limit=0.70,
            proof=f"{about}, {flops_per_token(stage.model, SEQ_LEN) / 1e6:.0f} MFLOP per token",
        ),
    ]


def measure_packing(workload: Workload, is_quick: bool) -> Sequence[Figure]:
    """Measure SFT on the same conversations: packed, and padded to the longest of each batch."""
    num_chats, num_rounds = (24, 1) if is_quick else (40, 2)
    stage = workload.chats(num_chats=num_chats, batch_size=BATCH_SIZE)
    model, rows = copy.deepcopy(stage.model), hf_trainer.rows_of(stage, stage.source.num_batches(0))
    # The packed batches are sorted by length, which would reduce the padding of the baseline.
    random.Random(SEED).shuffle(rows)
    num_batches = -(-len(rows) // CHATS_PER_BATCH)

    def train_plain(_: int) -> Timeline:
        return hf_trainer.run(model, rows, CHATS_PER_BATCH, num_batches, workload.folder / "plain")

    turns = take_turns(lambda _: ours.run(stage), train_plain, num_rounds)
    num_tokens = [sum(one.tokens) for one in (turns.our_results[0], turns.baseline_results[0])]
    assert num_tokens[0] == num_tokens[1], num_tokens
    return [
        Figure(
            name="packed SFT of 32 to 512 tokens, against padded",
            model="",
            ours=median(one.speed for one in turns.our_results),
            baseline=median(one.speed for one in turns.baseline_results),
            unit="tokens/s",
            limit=2.0,
            proof=f"{len(rows)} conversations, {num_tokens[0]:,} tokens on both sides; "
            f"{_padding(rows):.0%} of the baseline's batches is padding",
        )
    ]


def _padding(rows: Sequence[hf_trainer.Example]) -> float:
    some = [rows[at : at + CHATS_PER_BATCH] for at in range(0, len(rows), CHATS_PER_BATCH)]
    computed = sum(hf_trainer.collate(batch)["input_ids"].numel() for batch in some)
    return 1.0 - sum(len(one.tokens) for one in rows) / computed


def _same_losses(mine: Sequence[Timeline], theirs: Sequence[Timeline]) -> str:
    """Compare the mean losses of each round; the baseline has one more round."""
    both = [[one.mean_loss for one in side] for side in (mine, theirs[: len(mine)])]
    return agreement(*both)


def matmul_peak() -> float:
    """Return the best speed of several matrix products in GFLOP/s."""
    one, other = torch.randn(2, PEAK_SIZE, PEAK_SIZE)
    out = torch.mm(one, other)
    best = min(_seconds(one, other, out) for _ in range(6))
    return 2.0 * PEAK_SIZE**3 / best / 1e9


def _seconds(one: Any, other: Any, out: Any) -> float:
    started = time.perf_counter()
    torch.mm(one, other, out=out)
    return time.perf_counter() - started
