"""A sample request on its way, from arrival to answer."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from tinkex.engine.sampling.adapter import SamplerAdapter
from tinkex.engine.sampling.asks import Ask, Tokens
from tinkex.engine.sampling.sequence import Sequence
from tinkex.engine.sampling.stops import Texts
from tinkex.types import SampledSequence, SampleResponse

if TYPE_CHECKING:
    from tinkex.engine.sampling.prompts import PromptScores
    from tinkex.nn.kept import Stored


class Fill:
    """Tokens that are being read, so that samples can go on from there."""

    def __init__(self, case: Case, tokens: Tokens, stored: Stored, num_done: int) -> None:
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

    def __init__(self, ticket: str, number: int, adapter: SamplerAdapter | None, ask: Ask) -> None:
        self.ticket = ticket
        self.number = number
        """Lower numbers came first."""
        self.adapter = adapter
        self.ask = ask
        self.fresh: list[Sequence] = []
        """Samples that have not begun; they begin where the prompt ends."""
        self.paused: list[Sequence] = []
        """Samples that had to make room; they go on where they were."""
        self.running: set[Sequence] = set()
        """Samples that take steps."""
        self.fill: Fill | None = None
        """What is being read for this request."""
        self.stored: Stored | None = None
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
    def has_begun(self) -> bool:
        """Whether it has anything that others would have to wait for."""
        return bool(self.running or self.paused or self.fill or self.stored or self._results)

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
