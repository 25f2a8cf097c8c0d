"""What a fine-tune tells: a report per step, and its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step that is done."""

    step: int
    """How many steps are done."""
    total: int
    """How many there are."""
    epoch: int
    """Counted from 1."""
    loss: float | None
    """The mean loss; None if nothing could be learned from the step's rows."""
    learning_rate: float
    num_tokens: int
    """How many tokens the model read in this step."""
    tokens_per_second: float
    """The pace of the last few steps."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else was measured."""

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it, metrics among the rest."""
        told = asdict(self)
        metrics = told.pop("metrics")
        return {**told, **metrics}


class Throughput:
    """Tokens per second over the last steps: they arrive in bursts, so one alone says nothing."""

    def __init__(self, started_at: float, num_steps: int = 10) -> None:
        self._history: deque[tuple[float, int]] = deque([(started_at, 0)], maxlen=num_steps + 1)

    def update(self, now: float, num_tokens: int) -> float:
        """The pace after a step that was done now."""
        self._history.append((now, num_tokens))
        total = sum(tokens for _, tokens in list(self._history)[1:])
        return total / max(now - self._history[0][0], 1e-9)


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A prompt, and what the trained model answers."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeResult:
    """Where a run got to, and what it left behind."""

    is_complete: bool
    """False if it was stopped; the same command goes on."""
    step: int
    total: int
    run_dir: Path
    state_path: str | None = None
    """The tinker:// path of weights and optimizer."""
    sampler_path: str | None = None
    """The tinker:// path of weights to sample from; set when the run is complete."""
    loss: float | None = None
    """The loss of the last step that had one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What was measured at the end."""
    samples: tuple[SampledAnswer, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON has it."""
        return {**asdict(self), "run_dir": str(self.run_dir)}
