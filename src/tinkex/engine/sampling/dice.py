"""Random numbers that depend on a seed and a stream alone, whatever else is drawn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
#: The stream of what is drawn along a prompt; no sample has this number.
PROMPT_STREAM = _MASK
#: How many numbers are drawn at once.
_NUM_AHEAD = 64


class Dice:
    """The random numbers of one stream of a seed: the t-th is always the same.

    They depend on the seed and the stream alone, whatever else is drawn at the same time.
    """

    def __init__(self, seed: int, stream: int, *, num_thrown: int = 0) -> None:
        key = np.array([seed & _MASK, stream & _MASK], dtype=np.uint64)
        self._source = np.random.Generator(np.random.Philox(key=key))
        self._source.random(num_thrown)
        self._ahead: list[float] = []

    def throw(self) -> float:
        """The next number, from 0 up to but not including 1."""
        if not self._ahead:
            self._ahead = self._source.random(_NUM_AHEAD).tolist()
            self._ahead.reverse()
        return self._ahead.pop()

    def throw_many(self, *shape: int) -> npt.NDArray[np.float64]:
        """Many numbers at once."""
        return self._source.random(shape)
