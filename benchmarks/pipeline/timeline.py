"""When the updates of a training run began and ended, and what they came to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(slots=True)
class Timeline:
    """One run of a side."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Of each update, without padding."""
    waits: list[float] = field(default_factory=list)
    """The seconds that each update waited for a save to have its copy."""

    def begin(self) -> None:
        """An update asks for its data."""
        self.begins.append(time.perf_counter())

    def end(self) -> None:
        """An update is done."""
        self.ends.append(time.perf_counter())

    @property
    def speed(self) -> float:
        """Tokens per second over all updates."""
        return sum(self.tokens) / (self.ends[-1] - self.begins[0])

    @property
    def warm_speed(self) -> float:
        """Tokens per second after the first update, which makes the optimizer's buffers."""
        return sum(self.tokens[1:]) / (self.ends[-1] - self.ends[0])

    @property
    def gaps(self) -> list[float]:
        """The seconds from the end of each update to the beginning of the next."""
        following = zip(self.ends, self.begins[1:], strict=False)
        return [begin - end for end, begin in following]

    @property
    def mean_loss(self) -> float:
        """The mean over updates."""
        return fmean(self.losses)
