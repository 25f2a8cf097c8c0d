"""What is measured: two sides in turn, and a figure with its promise and its proof."""

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
    """One line of the table."""

    name: str
    model: str
    ours: float
    baseline: float
    unit: str
    limit: float | None = None
    is_less_better: bool = False
    spread: float | None = None
    """The baseline's largest minus its smallest turn, as a share of its median."""
    proof: str = ""
    """What shows that both sides did the same work."""

    @property
    def row(self) -> Row:
        """As the common table has it."""
        judge = at_most if self.is_less_better else at_least
        name = f"{self.name}, {self.model}" if self.model else self.name
        return judge(name, self.ours, self.baseline, self.unit, self.limit)


@dataclass(frozen=True, slots=True)
class Turns:
    """The seconds of each turn, and what came out of it."""

    ours: list[float]
    baseline: list[float]
    our_results: list[Any]
    baseline_results: list[Any]

    @property
    def our_seconds(self) -> float:
        """The usual turn of ours."""
        return median(self.ours)

    @property
    def baseline_seconds(self) -> float:
        """The usual turn of the baseline."""
        return median(self.baseline)

    @property
    def spread(self) -> float | None:
        """How far the baseline's turns are apart."""
        if len(self.baseline) < 2:
            return None
        return (max(self.baseline) - min(self.baseline)) / self.baseline_seconds


def take_turns(
    ours: Callable[[int], Any], baseline: Callable[[int], Any], num_repeats: int
) -> Turns:
    """Ours between two turns of the baseline, so that a machine that slows down slows both.

    Each is called with the number of its turn, so that both see the same data in the same order.
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
    """The losses of both sides, and how far they are apart at most."""
    worst = max(
        abs(mine - theirs) / abs(theirs) for mine, theirs in zip(ours, baseline, strict=True)
    )
    verdict = "" if worst <= 1e-3 else "; THEY DISAGREE"
    return f"last loss {ours[-1]:.4f} : {baseline[-1]:.4f}, apart by {worst:.1e} at most{verdict}"


def log_progress(text: str) -> None:
    """Say how far it is, beside the output."""
    print(text, file=sys.stderr, flush=True)
