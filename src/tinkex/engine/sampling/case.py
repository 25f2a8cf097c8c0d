"""A sample request on its way, from arrival to answer, and each of its sequences."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tinkex.engine.sampling.adapter import SamplerAdapter
from tinkex.engine.sampling.asks import Ask, Tokens
from tinkex.engine.sampling.dice import Dice
from tinkex.engine.sampling.stops import Texts, TextWatch
from tinkex.types import SampledSequence, SampleResponse
from tinkex.types.sampling import FILLER_LOGPROB, StopReason, TopkLogprobs

if TYPE_CHECKING:
    from tinkex.engine.sampling.prompts import PromptScores
    from tinkex.nn.kept import PromptKV

Floats = npt.NDArray[np.float32]
TopkRow = tuple[npt.NDArray[np.int32], Floats]


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


class Fill:
    """Tokens that are being read, so that samples can go on from there."""

    def __init__(self, case: Case, tokens: Tokens, stored: PromptKV, num_done: int) -> None:
        self.case = case
        self.tokens = tokens
        self.stored = stored
        self.num_done = num_done

    @property
    def num_left(self) -> int:
        """How many tokens are still to be read."""
        return len(self.tokens) - self.num_done


class Case:
    """One request: its samples that wait, run and are over."""

    def __init__(
        self,
        ticket: str,
        number: int,
        adapter: SamplerAdapter | None,
        ask: Ask,
        *,
        scope: str = "",
    ) -> None:
        self.ticket = ticket
        self.number = number
        """Lower numbers came first."""
        self.adapter = adapter
        self.ask = ask
        self.scope = scope
        """Whose prompts may be recognised in this one's."""
        self.is_bulk = False
        """Whether it runs with those of tenants that have many sequences."""
        self.fresh: list[Sequence] = []
        """Samples that have not begun; they begin where the prompt ends."""
        self.paused: list[Sequence] = []
        """Samples that had to make room; they go on where they were."""
        self.running: set[Sequence] = set()
        """Samples that take steps."""
        self.fill: Fill | None = None
        """What is being read for this request."""
        self.stored: PromptKV | None = None
        """What was read, while samples wait to go on from its end."""
        self.scores: PromptScores | None = None
        """What was found out about the prompt."""
        self.num_cached = 0
        """How many tokens of the prompt needed no reading."""
        self._results: dict[int, SampledSequence] = {}

    @property
    def key(self) -> Hashable:
        """Which weights it is sampled with."""
        return self.adapter.key if self.adapter is not None else None

    @property
    def prefix_key(self) -> Hashable:
        """With which other requests it may share what is read."""
        return self.scope, self.key

    @property
    def is_active(self) -> bool:
        """Whether it has a part in passes now, or holds memory."""
        return bool(self.running or self.fill or self.stored)

    @property
    def num_open(self) -> int:
        """How many of its samples are not over."""
        return len(self.fresh) + len(self.paused) + len(self.running)

    @property
    def waiting(self) -> list[Sequence]:
        """Samples that go on from what is read now, or was: all that begin, or one paused."""
        return self.fresh or self.paused[:1]

    def open(self, texts: Texts | None) -> None:
        """Make its samples."""
        self.fresh = [Sequence(self, index, texts) for index in range(self.ask.num_samples)]

    def next_tokens(self) -> Tokens | None:
        """What has to be read next: the prompt, or all of a paused sample; None if nothing."""
        if self.fresh:
            return self.ask.prompt
        return self.paused[0].context if self.paused else None

    def take_waiting(self, num: int) -> list[Sequence]:
        """Let some samples run that go on from what was read."""
        line = self.fresh or self.paused
        started = line[:num]
        del line[:num]
        self.running.update(started)
        return started

    def pause(self, sequence: Sequence) -> None:
        """Let a sample wait that was running."""
        self.running.remove(sequence)
        # At the end: what is being read may be the first one's.
        self.paused.append(sequence)

    def start_over(self) -> None:
        """Let all samples wait, for all that was kept of them is gone."""
        self.fill = self.stored = None
        stopped = sorted(self.running, key=lambda one: one.index)
        self.running.clear()
        for one in stopped:
            # A number may have been thrown for a token that never came.
            one.dice = Dice(self.ask.seed, one.index, num_thrown=len(one.tokens))
        self.fresh = [one for one in stopped if not one.tokens] + self.fresh
        self.paused += [one for one in stopped if one.tokens]

    def finish(self, sequence: Sequence) -> bool:
        """Note that a sample is over; whether all are."""
        self.running.remove(sequence)
        self._results[sequence.index] = sequence.result()
        return len(self._results) == self.ask.num_samples

    def response(self) -> SampleResponse:
        """The answer."""
        sequences = [self._results[index] for index in range(self.ask.num_samples)]
        if self.scores is None:
            return SampleResponse(sequences, prompt_cache_hit_tokens=self.num_cached)
        return self.scores.response(sequences, self.num_cached)


def joined_topk(rows: list[TopkRow]) -> TopkLogprobs:
    """The likeliest tokens of each position, one row each."""
    ids = np.stack([ids for ids, _ in rows])
    logprobs = np.stack([values for _, values in rows])
    # No number stands for "impossible" on the wire, and nothing stands below the filler.
    return TopkLogprobs(ids, np.maximum(logprobs, np.float32(FILLER_LOGPROB)))
