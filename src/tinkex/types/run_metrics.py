"""How a training run goes, step by step; only tinkex servers tell it."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias

import msgspec

from tinkex.types.base import Reply
from tinkex.types.training import ModelID

RunSessionStatus: TypeAlias = Literal["active", "finished", "lost"]


class RunStep(Reply):
    """One optimizer step, with the passes whose gradients it applied."""

    step: int
    """Its number; the first optimizer step of a run is 1."""
    cursor: int
    """Pass it as `after` to get what follows."""
    loss: float | None = None
    """Per token; None if no pass has told its loss."""
    num_tokens: int = 0
    """Tokens of its passes."""
    num_passes: int = 0
    """How many passes it had."""
    seconds: float = 0.0
    """From the start of its first pass to its end."""
    finished_at: datetime
    """When it was done."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """What its passes and the optimizer told; what is no finite number is left out."""


class RunMetricsResponse(Reply):
    """Some steps of a run, and how it stands now."""

    training_run_id: ModelID
    """The run."""
    steps: list[RunStep]
    """Oldest first."""
    num_steps: int
    """How many optimizer steps the run has done."""
    is_whole: bool = True
    """Whether it remembers the run from its beginning; the oldest steps are forgotten in time."""
    status: RunSessionStatus = "active"
    """Whether its client is there: active, finished by the client, or lost."""
    state: str | None = None
    """training, waiting, idle, finished, interrupted or failed; None if it is not known."""
    name: str | None = None
    """The name of the run, if it has one."""
    loss: float | None = None
    """The newest loss per token that was told."""
    tokens_per_second: float | None = None
    """How fast the latest passes were, with the pauses between them."""
    num_waiting: int = 0
    """Operations of the run that wait for their turn."""
    num_running: int = 0
    """Operations of the run that are being done."""
