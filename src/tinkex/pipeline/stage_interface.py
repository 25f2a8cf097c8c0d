"""Interface between a stage and the training loop: batches, losses, plan and result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tinkex.errors import ConfigError
from tinkex.schedules import learning_rate

if TYPE_CHECKING:
    from torch import Tensor, nn

ScheduleName = Literal["cosine", "constant"]
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """Position in the data: `index` micro-batches of `epoch` are done, over all ranks."""

    epoch: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWindow:
    """The micro-batches of one update, and the position after it."""

    epoch: int
    indexes: range
    after: DataPosition


def next_window(position: DataPosition, num_batches: int, batches_per_update: int) -> UpdateWindow:
    """Return the window of the next update; the last one of an epoch may be smaller."""
    end = min(position.index + batches_per_update, num_batches)
    after = replace(position, index=end)
    if end >= num_batches:
        after = DataPosition(epoch=position.epoch + 1)
    return UpdateWindow(epoch=position.epoch, indexes=range(position.index, end), after=after)


def count_updates(
    position: DataPosition, epochs: int, num_batches: Callable[[int], int], batches_per_update: int
) -> int:
    """Return the number of updates from a position to the end of the last epoch."""
    if position.epoch >= epochs:
        return 0
    first = math.ceil((num_batches(position.epoch) - position.index) / batches_per_update)
    rest = range(position.epoch + 1, epochs)
    return max(0, first) + sum(math.ceil(num_batches(epoch) / batches_per_update) for epoch in rest)


class MicroBatch(Protocol):
    """A micro-batch, ready for the stage's loss."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, for the reported throughput."""
        ...

    @property
    def num_samples(self) -> int:
        """Number of rows, or pairs in DPO."""
        ...


class BatchSource(Protocol):
    """The data of a stage, for all ranks together.

    Rank r of w takes the batches with index % w == r, so a source does not depend on the ranks
    and a run can resume with a different number of them.
    """

    def num_batches(self, epoch: int) -> int:
        """Return the number of micro-batches of an epoch, including a shorter last one."""
        ...

    def batch(self, epoch: int, index: int) -> MicroBatch:
        """Return a micro-batch by random access; (seed, epoch, index) determine it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoss:
    """Contribution of one micro-batch to the loss of an update."""

    total: Tensor
    """Differentiable; a sum over tokens or pairs, not a mean."""
    weight: float
    """Number of tokens or pairs; gradients are divided by its sum over batches and ranks."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Sums, divided by the total weight when logged; every batch has the same names."""


class Stage(Protocol):
    """A model, its data and its loss."""

    @property
    def name(self) -> str:
        """One of pretrain, sft, dpo, r1."""
        ...

    @property
    def model(self) -> nn.Module:
        """The model to train, already on its device; it may be compiled."""
        ...

    @property
    def source(self) -> BatchSource:
        """The training data."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings that must not change between a checkpoint and a run that resumes from it.

        Plain JSON: model sizes, digests of data, tokenizer and parent, loss settings. The loop
        adds those of the plan (seed, batch size, optimizer, ...).
        """
        ...

    def loss(self, batch: Any) -> StageLoss:
        """Compute the loss of one micro-batch."""
        ...

    def evaluate(self) -> Mapping[str, float]:
        """Compute metrics on the eval split, the main one first; called on rank 0 only."""
        ...

    def write_legacy(self, weights: Mapping[str, Tensor], directory: Path) -> None:
        """Write the single-file weights (`<name>_<hidden>.pth`) atomically.

        Called at every save on the writer thread with a copy of the model's state. Names have no
        wrapper prefixes; tied weights share storage.
        """
        ...

    def export(self, directory: Path) -> None:
        """Write the Hugging Face folder atomically; called once, at the end of training."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """Settings of the training loop."""

    out_dir: Path
    """Output directory of the stage; its subdirectory `hf` is the Hugging Face folder."""
    ckpt_dir: Path | None = None
    """Root of step checkpoints; None means `checkpoints` in out_dir."""
    epochs: int = 1
    max_steps: int = 0
    """Updates after which training ends; 0 means at the end of the epochs."""
    batch_size: int = 8
    accumulation_steps: int = 1
    """Micro-batches per rank and update; the last update of an epoch may have fewer."""
    learning_rate: float = 6e-4
    min_learning_rate: float | None = None
    """Final value of the cosine schedule; None means a tenth of learning_rate."""
    warmup_steps: int = 0
    schedule: ScheduleName = "cosine"
    optimizer: OptimizerName = "adamw"
    muon_lr: float = 0.02
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    """Maximum gradient norm; 0 means no clipping."""
    seed: int = 1337
    save_interval: int = 200
    """Updates between saves; 0 saves only at the end."""
    save_interval_seconds: float = 0.0
    keep_last_checkpoints: int = 3
    """Number of newest steps to keep; 0 keeps all."""
    keep_every: int = 0
    """Steps that are multiples of it are never pruned; 0 means none."""
    eval_interval: int = 0
    """Updates between evaluations; 0 evaluates only before and after training."""
    log_interval: int = 10
    device: str = "cpu"
    dtype: str = "float32"
    tensorboard_dir: Path | None = None
    allow_partial: bool = False
    """Resume from a checkpoint whose settings or weights differ, with a warning for each."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Command-line arguments, recorded in state.json."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulation_steps", "log_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.schedule not in ("cosine", "constant"):
            raise ConfigError(f"schedule must be cosine or constant, got {self.schedule!r}")
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer must be adamw or muon, got {self.optimizer!r}")

    @property
    def checkpoint_root(self) -> Path:
        """Root directory of step checkpoints."""
        return self.ckpt_dir if self.ckpt_dir is not None else self.out_dir / "checkpoints"

    @property
    def final_learning_rate(self) -> float:
        """Learning rate at the end of the schedule."""
        if self.min_learning_rate is None:
            return self.learning_rate / 10
        return self.min_learning_rate

    def lr_factor(self, step: int, total_steps: int) -> float:
        """Return the learning rate of the update after `step` others, relative to its peak.

        Optimizer parameter groups have different peaks and share this factor.
        """
        peak = self.learning_rate
        return learning_rate(
            step,
            peak=1.0,
            warmup=self.warmup_steps,
            total=total_steps,
            kind=self.schedule,
            floor=self.final_learning_rate / peak if peak else 1.0,
        )

    def is_save_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step` updates."""
        return bool(self.save_interval) and step % self.save_interval == 0

    def is_evaluation_due(self, step: int) -> bool:
        """Return True if an evaluation is due: before the first update and at every interval."""
        return step == 0 or (bool(self.eval_interval) and step % self.eval_interval == 0)


_NOT_NEGATIVE = (
    "max_steps",
    "learning_rate",
    "warmup_steps",
    "muon_lr",
    "weight_decay",
    "grad_clip",
    "save_interval",
    "save_interval_seconds",
    "keep_last_checkpoints",
    "keep_every",
    "eval_interval",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Result of the training loop."""

    stage: str
    steps: int
    """Updates since the start of the stage, including those before a resume."""
    tokens: int
    samples: int
    seconds: float
    """Training time, including that before a resume."""
    before: Mapping[str, float]
    """Eval metrics before the first update."""
    after: Mapping[str, float]
    """Eval metrics at the end; empty if the run was stopped."""
    stopped_by: int | None = None
    """The signal that stopped the run, or None if training is complete."""
    checkpoint: Path | None = None
    """The newest step checkpoint; None except on rank 0."""

    @property
    def is_complete(self) -> bool:
        """True if training is complete."""
        return self.stopped_by is None

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 0, or 128 + the signal number."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by
