"""Passes in progress: computed one micro-batch at a time, so that other work can run in between."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeAlias

from tinkex.engine.protocol import EngineFailure
from tinkex.types import ForwardBackwardOutput

PassOutcome: TypeAlias = ForwardBackwardOutput | EngineFailure
PassSteps: TypeAlias = Generator[int, None, Sequence[PassOutcome]]
"""Yields the number of tokens of each micro-batch but the last; returns one outcome per pass."""


class GeneratorPassRun:
    """Runs a generator of micro-batches step by step."""

    def __init__(self, steps: PassSteps) -> None:
        self._steps = steps
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens the steps so far have computed, without the last step."""
        return self._num_tokens

    def step(self) -> Sequence[PassOutcome] | None:
        """Compute one micro-batch; returns the outcomes after the last one."""
        try:
            self._num_tokens += next(self._steps)
        except StopIteration as end:
            outcomes: Sequence[PassOutcome] = end.value
            return outcomes
        return None

    def cancel(self) -> None:
        """Stop here; no pass of this run takes effect."""
        self._steps.close()

    def finish(self) -> Sequence[PassOutcome]:
        """Compute all that is left."""
        while (outcomes := self.step()) is None:
            pass
        return outcomes
