"""A sequence on its way: what was drawn, the dice it is drawn with, and when it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tinkex.engine.sampling.stops import Texts, TextWatch
from tinkex.types import SampledSequence
from tinkex.types.sampling import FILLER_LOGPROB, StopReason, TopkLogprobs

if TYPE_CHECKING:
    from tinkex.engine.sampling.case import Case

Floats = npt.NDArray[np.float32]
TopkRow = tuple[npt.NDArray[np.int32], Floats]

_MASK = (1 << 64) - 1
#: The stream of what is drawn along a prompt; no sample has this number.
PROMPT_STREAM = _MASK
#: How many numbers are drawn at once.
_NUM_AHEAD = 64


class Dice:
    """The random numbers of one stream of a seed: the t-th is always the same.

    They depend on the seed and the stream alone, whatever else is drawn at the same time.
    """

    def __init__(self, seed: int, stream: int) -> None:
        key = np.array([seed & _MASK, stream & _MASK], dtype=np.uint64)
        self._source = np.random.Generator(np.random.Philox(key=key))
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


class Sequence:
    """One sample of a request."""

    __slots__ = (
        "_topk",
        "_watch",
        "ask",
        "case",
        "dice",
        "index",
        "logprobs",
        "reason",
        "tokens",
    )

    def __init__(self, case: Case, index: int, texts: Texts | None) -> None:
        ask = case.ask
        self.case = case
        self.ask = ask
        self.index = index
        """Which of the request's samples it is."""
        self.dice = Dice(ask.seed, index)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.reason: StopReason | None = None
        """Why it is over; None while it is not."""
        self._topk: list[TopkRow] = []
        self._watch = TextWatch(texts, ask.stops.texts) if texts and ask.stops.texts else None

    def take(self, token: int, logprob: float, topk: TopkRow | None = None) -> bool:
        """Add a token that was drawn; whether the sequence is over."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if topk is not None:
            self._topk.append(topk)
        if token in self.ask.stops.tokens or (self._watch and self._watch.ends_with(token)):
            self.reason = "stop"
        elif len(self.tokens) >= self.ask.max_tokens:
            self.reason = "length"
        return self.reason is not None

    @property
    def age(self) -> tuple[int, int]:
        """Lower came first."""
        return self.case.number, self.index

    @property
    def context(self) -> npt.NDArray[np.int64]:
        """The prompt and all that was drawn."""
        return np.concatenate([self.ask.prompt, np.array(self.tokens, dtype=np.int64)])

    def result(self) -> SampledSequence:
        """What is answered."""
        assert self.reason is not None
        return SampledSequence(
            self.reason,
            "",
            np.array(self.tokens, dtype=np.int32),
            np.array(self.logprobs, dtype=np.float32),
            joined_topk(self._topk) if self.ask.num_topk > 0 else None,
        )


def joined_topk(rows: list[TopkRow]) -> TopkLogprobs:
    """The likeliest tokens of each position, one row each."""
    ids = np.stack([ids for ids, _ in rows])
    logprobs = np.stack([values for _, values in rows])
    # No number stands for "impossible" on the wire, and nothing stands below the filler.
    return TopkLogprobs(ids, np.maximum(logprobs, np.float32(FILLER_LOGPROB)))
