"""Start and end times, losses and tokens of the updates of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(slots=True)
class Timeline:
    """Measurements of one run."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Tokens per update, without padding."""
    waits: list[float] = field(default_factory=list)
    """Seconds that each update waited for the copy of a save."""

    def begin(self) -> None:
        """Record the start of an update."""
        self.begins.append(time.perf_counter())

    def end(self) -> None:
        """Record the end of an update."""
        self.ends.append(time.perf_counter())

    @property
    def speed(self) -> float:
        """Tokens per second over all updates."""
        return sum(self.tokens) / (self.ends[-1] - self.begins[0])

    @property
    def warm_speed(self) -> float:
        """Tokens per second without the first update, which allocates the optimizer state."""
        return sum(self.tokens[1:]) / (self.ends[-1] - self.ends[0])

    @property
    def gaps(self) -> list[float]:
        """Seconds from the end of each update to the start of the next."""
        pairs = zip(self.ends, self.begins[1:], strict=False)
        return [begin - end for end, begin in pairs]

    @property
    def mean_loss(self) -> float:
        """Mean loss over all updates."""
        return fmean(self.losses)
