"""Interface between a stage and the training loop: batches, losses and result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


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
    def config(self) -> Mapping[str, object]:
        """Settings that must not change between a checkpoint and a run that resumes from it.

        Plain JSON: model sizes, digests of data, tokenizer and parent, loss settings. The loop
        adds those of the trainer (seed, batch size, optimizer, ...).
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
