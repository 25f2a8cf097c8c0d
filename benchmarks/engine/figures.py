"""Alternating measurements of two sides, and figures with a limit and a proof."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import Row, at_least, at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the results table."""

    name: str
    model: str
    ours: float
    baseline: float
    unit: str
    limit: float | None = None
    is_less_better: bool = False
    spread: float | None = None
    """Range of the baseline's turns, relative to their median."""
    proof: str = ""
    """Evidence that both sides did the same work."""

    @property
    def row(self) -> Row:
        """The figure as a row of the common table."""
        judge = at_most if self.is_less_better else at_least
        name = f"{self.name}, {self.model}" if self.model else self.name
        return judge(name, self.ours, self.baseline, self.unit, self.limit)


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds and results of each turn."""

    ours: list[float]
    baseline: list[float]
    our_results: list[Any]
    baseline_results: list[Any]

    @property
    def our_seconds(self) -> float:
        """Median seconds of our turns."""
        return median(self.ours)

    @property
    def baseline_seconds(self) -> float:
        """Median seconds of the baseline's turns."""
        return median(self.baseline)

    @property
    def spread(self) -> float | None:
        """Range of the baseline's turns, relative to their median."""
        if len(self.baseline) < 2:
            return None
        return (max(self.baseline) - min(self.baseline)) / self.baseline_seconds


def take_turns(
    ours: Callable[[int], Any], baseline: Callable[[int], Any], num_repeats: int
) -> Turns:
    """Run our turns between turns of the baseline, so that a slowing machine affects both.

    Each side is called with the index of its turn, so that both see the same data in order.
    """
    turns = Turns([], [], [], [])
    _take(baseline, 0, turns.baseline, turns.baseline_results)
    for number in range(num_repeats):
        _take(ours, number, turns.ours, turns.our_results)
        _take(baseline, number + 1, turns.baseline, turns.baseline_results)
    return turns


def _take(
    side: Callable[[int], Any], number: int, seconds: list[float], results: list[Any]
) -> None:
    started = time.perf_counter()
    result = side(number)
    seconds.append(time.perf_counter() - started)
    results.append(result)


def agreement(ours: list[float], baseline: list[float]) -> str:
    """Describe the losses of both sides and their largest relative difference."""
    worst = max(
        abs(mine - theirs) / abs(theirs) for mine, theirs in zip(ours, baseline, strict=True)
    )
    verdict = "" if worst <= 1e-3 else "; THEY DISAGREE"
    return f"last loss {ours[-1]:.4f} : {baseline[-1]:.4f}, apart by {worst:.1e} at most{verdict}"


def log_progress(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)
