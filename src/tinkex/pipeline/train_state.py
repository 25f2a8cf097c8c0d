"""Training progress and RNG state: what a later process needs to resume exactly."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypedDict

import numpy as np
import torch

from tinkex.errors import CheckpointError
from tinkex.pipeline.stage_interface import DataPosition

#: Metrics whose name contains one of these are better when higher.
_HIGHER_IS_BETTER = ("accuracy", "match", "reward", "margin")


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Position and counters of a run; the loop changes them only after each update."""

    epoch: int = 0
    step_in_epoch: int = 0
    """Finished micro-batches of this epoch, over all ranks."""
    global_step: int = 0
    """Number of optimizer updates."""
    tokens: int = 0
    samples: int = 0
    seconds: float = 0.0
    world_size: int = 1
    total_steps: int = 0
    """Step at which the schedule ends."""
    best_metric: float | None = None
    best_step: int | None = None
    before: dict[str, float] = field(default_factory=dict)
    """Eval metrics before the first update."""
    held_out: dict[str, float] = field(default_factory=dict)
    """The latest eval metrics."""
    evaluated_step: int = -1
    """The step of the latest evaluation."""

    @property
    def position(self) -> DataPosition:
        """Position in the data."""
        return DataPosition(epoch=self.epoch, index=self.step_in_epoch)

    def record_evaluation(self, values: Mapping[str, float]) -> bool:
        """Store eval metrics; returns True if the main one is the best since training began."""
        self.held_out, self.evaluated_step = dict(values), self.global_step
        if not self.global_step:
            self.before = dict(values)
        name, value = next(iter(values.items()), ("", math.nan))
        if not self.global_step or not math.isfinite(value):
            return False
        sign = 1.0 if is_higher_better(name) else -1.0
        if self.best_metric is not None and sign * value <= sign * self.best_metric:
            return False
        self.best_metric, self.best_step = value, self.global_step
        return True

    def to_record(self) -> dict[str, object]:
        """Return the content of state.json; values that are not finite become null."""
        record = asdict(self)
        for name in ("before", "held_out"):
            values = getattr(self, name)
            record[name] = {metric: _finite(value) for metric, value in values.items()}
        return record


def is_higher_better(metric: str) -> bool:
    """Return True for metrics like accuracy, False for those like loss."""
    return any(word in metric for word in _HIGHER_IS_BETTER)


def read_state(record: Mapping[str, Any]) -> TrainState:
    """Parse state.json; older checkpoints have only the three counters."""
    known = {item.name for item in fields(TrainState)}
    state = TrainState(**{name: value for name, value in record.items() if name in known})
    for name in ("epoch", "step_in_epoch", "global_step"):
        value = record.get(name)
        if not isinstance(value, int) or value < 0:
            raise CheckpointError(
                f"state.json has {name} {value!r}, expected a non-negative integer"
            )
    state.before, state.held_out = _metric_values(state.before), _metric_values(state.held_out)
    return state


def _metric_values(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else float(value) for name, value in values.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class RngState(TypedDict):
    """State of all random generators of a process, as plain values and tensors."""

    python: list[Any]
    numpy: list[Any]
    torch: torch.Tensor
    cuda: list[torch.Tensor]


def seed_everything(seed: int, rank: int) -> None:
    """Seed all random generators; each rank gets a different seed."""
    random.seed(f"{seed}:{rank}")
    np.random.seed((seed + 7919 * rank) % 2**32)
    torch.manual_seed(seed + 7919 * rank)


def capture_rng() -> RngState:
    """Return the state of all random generators of this process as plain values and tensors."""
    version, numbers, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(saved: RngState) -> None:
    """Restore the state of all random generators."""
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])
