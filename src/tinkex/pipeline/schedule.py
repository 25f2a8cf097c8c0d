"""How long training lasts and how fast it learns, counted in updates of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tinkex.pipeline.stage_interface import ScheduleName, TrainPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate as a share of its peak, so that every group keeps a peak of its own."""

    name: ScheduleName = "cosine"
    warmup_steps: int = 0
    total_steps: int = 1
    final_factor: float = 0.1

    def factor(self, step: int) -> float:
        """What the update after `step` others multiplies its peak learning rate by."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        wave = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return self.final_factor + (1.0 - self.final_factor) * wave


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """Where in the data a run is: `index` micro-batches of `epoch` are done, of all ranks."""

    epoch: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWindow:
    """The micro-batches of one update, and where the run is after it."""

    epoch: int
    indexes: range
    after: DataPosition


def next_window(position: DataPosition, num_batches: int, batches_per_update: int) -> UpdateWindow:
    """The next `width` micro-batches, or what is left of the epoch: no remainder is lost."""
    end = min(position.index + batches_per_update, num_batches)
    after = replace(position, index=end)
    if end >= num_batches:
        after = DataPosition(epoch=position.epoch + 1)
    return UpdateWindow(epoch=position.epoch, indexes=range(position.index, end), after=after)


def count_updates(
    position: DataPosition, epochs: int, num_batches: Callable[[int], int], batches_per_update: int
) -> int:
    """How many updates are left from a position to the end of the last epoch."""
    if position.epoch >= epochs:
        return 0
    first = math.ceil((num_batches(position.epoch) - position.index) / batches_per_update)
    rest = range(position.epoch + 1, epochs)
    return max(0, first) + sum(math.ceil(num_batches(epoch) / batches_per_update) for epoch in rest)


def make_schedule(plan: TrainPlan, total_steps: int) -> Schedule:
    """The schedule of a plan that takes this many updates in all."""
    peak = plan.learning_rate
    return Schedule(
        name=plan.schedule,
        warmup_steps=plan.warmup_steps,
        total_steps=total_steps,
        final_factor=plan.final_learning_rate / peak if peak else 1.0,
    )


def is_save_due(plan: TrainPlan, step: int) -> bool:
    """True when a step is to be saved for its number."""
    return bool(plan.save_interval) and step % plan.save_interval == 0


def is_evaluation_due(plan: TrainPlan, step: int) -> bool:
    """True when held-out data is to be looked at: before the first update, and now and then."""
    return step == 0 or (bool(plan.eval_interval) and step % plan.eval_interval == 0)
