"""What a stage brings to the training loop, and the plan by which the loop trains it."""

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
    """One micro-batch, ready for the stage's loss."""

    @property
    def num_tokens(self) -> int:
        """How many tokens count for the speed that is shown."""
        ...

    @property
    def num_samples(self) -> int:
        """How many rows, or pairs, are in it."""
        ...


class BatchSource(Protocol):
    """The data of a stage, for all ranks together: the loop deals the batches out.

    Rank r of w takes the batches whose index leaves the remainder r, so a source knows nothing
    of ranks, and a run may go on with another number of them.
    """

    def num_batches(self, epoch: int) -> int:
        """How many micro-batches an epoch has, the last and shorter one included."""
        ...

    def batch(self, epoch: int, index: int) -> MicroBatch:
        """The same batch for the same (seed, epoch, index), without reading those before it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoss:
    """What one micro-batch adds to the loss of an update."""

    total: Tensor
    """Differentiable; a sum over what is counted (tokens, pairs), not a mean."""
    weight: float
    """How many were counted; the sum over accumulation and ranks is what gradients divide by."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Sums, divided by the summed weight when they are logged; every batch has the same names."""


class Stage(Protocol):
    """What the loop trains: a model, its data and its loss."""

    @property
    def name(self) -> str:
        """One of pretrain, sft, dpo, r1."""
        ...

    @property
    def model(self) -> nn.Module:
        """What is trained; it may be compiled, and is on its device already."""
        ...

    @property
    def source(self) -> BatchSource:
        """The data it is trained on."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """What must not change between a checkpoint and the run that goes on from it.

        Sizes of the model, digests of data, tokenizer and parent, the loss's own settings: plain
        JSON. The loop adds the plan's own (seed, batch size, optimizer, ...).
        """
        ...

    def loss(self, batch: Any) -> StageLoss:
        """The loss of one micro-batch."""
        ...

    def evaluate(self) -> Mapping[str, float]:
        """Figures on held-out data; the first is the stage's own metric. Rank 0 alone is asked."""
        ...

    def write_legacy(self, weights: Mapping[str, Tensor], directory: Path) -> None:
        """Write the one-file weights (`<name>_<hidden>.pth`) into a directory, whole or not.

        Called at every save from the writer's thread with a copy of the model's state that
        training does not touch; names are without wrapper prefixes, tied weights share storage.
        """
        ...

    def export(self, directory: Path) -> None:
        """Write the Hugging Face folder, whole or not at all; called once, when all is trained."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """How long, how fast and where to a stage is trained."""

    out_dir: Path
    """Where the stage's results are written; the Hugging Face folder is `hf` in it."""
    ckpt_dir: Path | None = None
    """Root of step checkpoints; None means `checkpoints` in out_dir."""
    epochs: int = 1
    max_steps: int = 0
    """Updates after which training ends; 0 means when the epochs are over."""
    batch_size: int = 8
    accumulation_steps: int = 1
    """Micro-batches of each rank in one update; the last update of an epoch may have fewer."""
    learning_rate: float = 6e-4
    min_learning_rate: float | None = None
    """Where cosine ends; None means a tenth of learning_rate."""
    warmup_steps: int = 0
    schedule: ScheduleName = "cosine"
    optimizer: OptimizerName = "adamw"
    muon_lr: float = 0.02
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 leaves it as it is."""
    seed: int = 1337
    save_interval: int = 200
    """Updates between saves; 0 saves at the end alone."""
    save_interval_seconds: float = 0.0
    keep_last_checkpoints: int = 3
    """How many of the newest steps stay; 0 keeps all."""
    keep_every: int = 0
    """Steps that are multiples of it stay for good; 0 means none."""
    eval_interval: int = 0
    """Updates between evaluations; 0 evaluates before and after training alone."""
    log_interval: int = 10
    device: str = "cpu"
    dtype: str = "float32"
    tensorboard_dir: Path | None = None
    allow_partial: bool = False
    """Go on from a checkpoint whose settings or weights differ, with a warning for each."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the command line, for the record in state.json."""

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
        """Where step checkpoints are."""
        return self.ckpt_dir if self.ckpt_dir is not None else self.out_dir / "checkpoints"

    @property
    def final_learning_rate(self) -> float:
        """Where the schedule ends."""
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
    """How a run of the loop ended."""

    stage: str
    steps: int
    """Updates since the beginning of the stage, those before a resume included."""
    tokens: int
    samples: int
    seconds: float
    """Spent in training, over all runs."""
    before: Mapping[str, float]
    """Held-out figures before the first update."""
    after: Mapping[str, float]
    """Held-out figures at the end; empty when the run was stopped."""
    stopped_by: int | None = None
    """The signal that stopped the run, or None: all is trained."""
    checkpoint: Path | None = None
    """The newest step checkpoint; None on other ranks than 0."""

    @property
    def is_complete(self) -> bool:
        """True when nothing is left to train."""
        return self.stopped_by is None

    @property
    def exit_code(self) -> int:
        """What the process should end with: 0, or 128 + the signal."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by
