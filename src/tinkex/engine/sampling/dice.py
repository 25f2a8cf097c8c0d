"""Random numbers that depend on a seed and a stream alone, whatever else is drawn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_UINT64_MASK = (1 << 64) - 1
#: The stream of what is drawn along a prompt; no sample has this number.
PROMPT_STREAM = _UINT64_MASK
#: How many numbers are drawn at once.
_BUFFER_SIZE = 64


class RandomStream:
    """The random numbers of one stream of a seed: the t-th is always the same.

    They depend on the seed and the stream alone, whatever else is drawn at the same time.
    """

    def __init__(self, seed: int, stream: int, *, num_skipped: int = 0) -> None:
        key = np.array([seed & _UINT64_MASK, stream & _UINT64_MASK], dtype=np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=key))
        self._generator.random(num_skipped)
        self._buffer: list[float] = []

    def uniform(self) -> float:
        """The next number, from 0 up to but not including 1."""
        if not self._buffer:
            self._buffer = self._generator.random(_BUFFER_SIZE).tolist()
            self._buffer.reverse()
        return self._buffer.pop()

    def uniform_array(self, *shape: int) -> npt.NDArray[np.float64]:
        """Many numbers at once."""
        return self._generator.random(shape)
