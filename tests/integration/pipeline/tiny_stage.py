"""A tiny stage that uses all random generators, and ways to interrupt its training."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.forkserver import forks_of
from tinkex.errors import TinkexError
from tinkex.pipeline.settings_sources import make_settings
from tinkex.pipeline.stage_interface import StageLoss, TrainResult
from tinkex.pipeline.train.loop import train
from tinkex.pipeline.train.metrics import JsonlSink
from tinkex.pipeline.train_settings import TrainSettings
from tinkex.pipeline.weights import named_weights

# The first optimizer imports much of torch; do it once for all forked children.
torch.optim.AdamW([torch.zeros(1)])

VOCABULARY = 32
LENGTH = 8


@dataclass(frozen=True)
class TinyBatch:
    """A few rows; each next token is the previous one plus 1."""

    rows: Tensor

    @property
    def num_tokens(self) -> int:
        return self.rows.numel()

    @property
    def num_samples(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class TinySource:
    """Seven batches per epoch, the last one shorter."""

    seed: int = 3
    num_rows: int = 27
    batch_size: int = 4

    def num_batches(self, epoch: int) -> int:
        return -(-self.num_rows // self.batch_size)

    def batch(self, epoch: int, index: int) -> TinyBatch:
        order = np.random.default_rng((self.seed, epoch)).permutation(self.num_rows)
        chosen = torch.from_numpy(order[index * self.batch_size :][: self.batch_size].copy())
        return TinyBatch((chosen[:, None] + torch.arange(LENGTH + 1)) % VOCABULARY)


class TinyModel(nn.Module):
    """An embedding tied to its head, with dropout between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.2)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(
            self.norm(self.dropout(torch.relu(self.hidden(self.embed(tokens)))))
        )
        return logits


@dataclass
class TinyStage:
    """Uses the Python, NumPy and torch generators in its loss, so that all must be restored."""

    width: int = 16
    name: str = "pretrain"
    source: TinySource = field(default_factory=TinySource)
    is_plain: bool = False
    """Without randomness: the loss depends only on the batch."""
    seconds_per_batch: float = 0.0
    fail_at_batch: int = -1
    fail_at_evaluation: int = -1
    num_losses: int = 0
    num_evaluations: int = 0
    exported: Path | None = None

    def __post_init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.model: nn.Module = TinyModel(self.width)

    @property
    def config(self) -> Mapping[str, Any]:
        return {"width": self.width, "rows": self.source.num_rows}

    def loss(self, batch: TinyBatch) -> StageLoss:
        self.num_losses += 1
        if self.num_losses == self.fail_at_batch:
            raise ValueError("a bad row")
        time.sleep(self.seconds_per_batch)
        if self.is_plain:
            self.model.eval()
            return self._measure(batch, 1.0)
        scale = 1.0 + 0.1 * random.random() + 0.1 * float(np.random.random())
        return self._measure(batch, scale)

    def _measure(self, batch: TinyBatch, scale: float) -> StageLoss:
        logits = self.model(batch.rows[:, :-1])
        targets = batch.rows[:, 1:]
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        right = float((logits.argmax(-1) == targets).sum())
        return StageLoss(total=total * scale, weight=targets.numel(), metrics={"accuracy": right})

    def evaluate(self) -> Mapping[str, float]:
        self.num_evaluations += 1
        if self.num_evaluations == self.fail_at_evaluation:
            raise ValueError("no held-out rows")
        torch.rand(3)
        self.model.eval()
        with torch.no_grad():
            loss = self._measure(self.source.batch(99, 0), 1.0)
        return {"loss": float(loss.total) / loss.weight}

    def write_legacy(self, weights: Mapping[str, Tensor], directory: Path) -> None:
        torch.save(dict(weights), directory / "tiny.pth")

    def export(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "digest").write_text(digest(self.model))
        self.exported = directory


def digest(model: nn.Module) -> str:
    """Return the digest of all weights."""
    hasher = hashlib.sha256()
    for name, value in sorted(named_weights(model).items()):
        hasher.update(name.encode() + value.detach().numpy().tobytes())
    return hasher.hexdigest()


def make_plan(out_dir: Path, **changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "out_dir": out_dir,
        "data_path": out_dir / "data.jsonl",
        "epochs": 3,
        "batch_size": 4,
        "accumulation_steps": 2,
        "learning_rate": 0.01,
        "warmup_steps": 2,
        "save_interval": 2,
        "keep_last_checkpoints": 2,
        "eval_interval": 3,
        "log_interval": 1,
    }
    return make_settings("pretrain", values | changes)


def run(
    out_dir: Path,
    *,
    resume: Path | str | None = "auto",
    stage: TinyStage | None = None,
    **changes: Any,
) -> TrainResult:
    """Train the tiny stage in this process."""
    sink = JsonlSink(out_dir / "metrics.jsonl")
    plan = make_plan(out_dir, resume=None if resume is None else str(resume), **changes)
    return train(stage or TinyStage(), plan, sink=sink)


#: Metrics that depend on the clock.
CLOCK = {"tokens_per_second"}


def read_metrics(out_dir: Path) -> list[dict[str, Any]]:
    """Return the logged metrics, without those that depend on the clock."""
    lines = (out_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in records]


def outcome(out_dir: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return the final weights digest and all metrics of a run, to compare runs."""
    return (out_dir / "hf" / "digest").read_text(), read_metrics(out_dir)


@dataclass(frozen=True)
class FaultSpec:
    """A fault to inject into a run in a child process."""

    kill_at_file_event: int = 0
    """SIGKILL right before the nth file operation in the checkpoint directory."""
    max_file_bytes: int = 0
    """Maximum file size; simulates a full disk."""
    signal_at_batch: tuple[int, int] = (0, 0)
    """A signal, and the batch at which it is sent."""
    fail_at_batch: int = -1
    seconds_per_batch: float = 0.0
    """Slows the run down, so that a test can interrupt it."""


FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def _kill_at(root: Path, nth: int) -> None:
    count = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in FILE_EVENTS or not str(args[0]).startswith(str(root)):
            return
        count += 1
        if count == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


class SignalledStage(TinyStage):
    """Sends a signal to its own process at a given batch."""

    signal_at: tuple[int, int] = (0, 0)

    def loss(self, batch: TinyBatch) -> StageLoss:
        number, at = self.signal_at
        if self.num_losses + 1 == at:
            os.kill(os.getpid(), number)
        return super().loss(batch)


def _run_in_child(out_dir: Path, fault: FaultSpec, changes: dict[str, Any]) -> None:
    import resource

    torch.set_num_threads(1)
    if fault.kill_at_file_event:
        _kill_at(out_dir / "checkpoints", fault.kill_at_file_event)
    if fault.max_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.max_file_bytes, fault.max_file_bytes))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    stage = SignalledStage(
        fail_at_batch=fault.fail_at_batch, seconds_per_batch=fault.seconds_per_batch
    )
    stage.signal_at = fault.signal_at_batch
    try:
        code = run(out_dir, stage=stage, **changes).exit_code
    except TinkexError as error:
        (out_dir / "error").write_text(str(error))
        code = 1
    sys.exit(code)


#: Imports this module too, so that all runs are forks of one fork server.
RANKS = "tests.integration.pipeline.ranks_script"


def start(out_dir: Path, fault: FaultSpec | None = None, **changes: Any) -> ForkServerProcess:
    """Train in a forked process that already has torch loaded."""
    process = forks_of(RANKS).Process(
        target=_run_in_child, args=(out_dir, fault or FaultSpec(), changes)
    )
    process.start()
    return process


def run_in_subprocess(out_dir: Path, fault: FaultSpec | None = None, **changes: Any) -> int:
    """Run in a child process and return its exit code; negative for a signal."""
    process = start(out_dir, fault, **changes)
    process.join(timeout=120)
    code = process.exitcode
    assert code is not None, "the run did not end"
    process.close()
    return code
