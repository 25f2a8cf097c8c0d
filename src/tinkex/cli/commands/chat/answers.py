"""Answers that appear while they are made.

The API has no streaming of samples. An answer is asked for in small pieces instead: each continues
what came before it, so together they are what one long request would have drawn, and the server
need not read again what it has read for the piece before.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tinkex.cli.commands.drawing import Drawing
from tinkex.errors import InvalidInput
from tinkex.recipes.rendering import Renderer
from tinkex.recipes.rows import ChatRow
from tinkex.types import ModelInput

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.types import SampledSequence

#: The first piece is small, so that something is seen soon.
FIRST_TOKENS = 4
MAX_PIECE_TOKENS = 64
SEEDED_TOKENS = 16
#: A piece should take about so long: shorter ones waste round trips, longer ones stutter.
PIECE_SECONDS = 0.3
#: What a tokenizer writes for bytes that are not yet a character.
_UNFINISHED = "\ufffd"

EndReason = Literal["stop", "length", "interrupted"]


def next_size(size: int, seconds: float) -> int:
    """How many tokens the next piece should have, after one of `size` took so long."""
    wanted = size * PIECE_SECONDS / max(seconds, 1e-3)
    # At most twice as many: one quick answer says little.
    return max(1, min(round(wanted), 2 * size, MAX_PIECE_TOKENS))


def settled(text: str, ends: Sequence[str], *, is_over: bool) -> tuple[str, bool]:
    """What of a text can be shown for good, and whether it has reached one of its ends."""
    places = [place for place in (text.find(end) for end in ends) if place >= 0]
    if places:
        return text[: min(places)], True
    if is_over:
        return text, False
    shown = text.rstrip(_UNFINISHED)
    for end in ends:
        for length in range(min(len(end) - 1, len(shown)), 0, -1):
            if shown.endswith(end[:length]):
                shown = shown[:-length]
                break
    return shown, False


@dataclass(frozen=True, slots=True)
class Manner:
    """How a model's answers are read, and where they end."""

    renderer: Renderer
    end_tokens: frozenset[int] = frozenset()
    """Besides the tokens that end a sample on the server."""
    end_texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, renderer: Renderer) -> Manner:
        """With a chat template, the token behind an answer; without, the next speaker's name."""
        if renderer.has_template:
            return cls(renderer, frozenset(_turn_end(renderer)))
        return cls(renderer, end_texts=("\nUser:", "\nSystem:"))


def _turn_end(renderer: Renderer) -> list[int]:
    """The special token that the chat template writes behind what the assistant says."""
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    try:
        example = renderer.render_examples(ChatRow((question, answer)))[0]
    except InvalidInput:
        return []
    special = set(getattr(renderer.tokenizer, "all_special_ids", ()))
    learned = itertools.compress(example.tokens, example.is_learned)
    return [token for token in learned if token in special][-1:]


class Answer:
    """One answer, piece by piece."""

    def __init__(
        self, sampler: SamplingClient, prompt: Sequence[int], drawing: Drawing, manner: Manner
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.end: EndReason | None = None
        self._sampler = sampler
        self._prompt = list(prompt)
        self._drawing = drawing
        self._manner = manner

    def pieces(self) -> Iterator[str]:
        """New text as it comes; KeyboardInterrupt gives up on the piece that is being made."""
        size = FIRST_TOKENS
        while self.end is None:
            size = min(size, self._drawing.max_tokens - len(self.tokens))
            began = time.monotonic()
            self._take(self._ask(size))
            if self._drawing.seed is None:
                size = next_size(size, time.monotonic() - began)
            else:
                # What is drawn depends on where pieces begin, which must not depend on the clock.
                size = SEEDED_TOKENS
            new = self._new_text()
            if new:
                yield new

    def _ask(self, size: int) -> SampledSequence:
        # The same seed again would throw the same dice for every piece.
        seed = self._drawing.seed
        own_seed = None if seed is None else seed + len(self.tokens)
        model_input = ModelInput.from_ints([*self._prompt, *self.tokens])
        asked = self._sampler.sample(model_input, 1, self._drawing.params(size, own_seed))
        try:
            return asked.result().sequences[0]
        except KeyboardInterrupt:
            asked.cancel()
            self.end = "interrupted"
            raise

    def _take(self, sequence: SampledSequence) -> None:
        for token in sequence.tokens:
            if token in self._manner.end_tokens:
                self.end = "stop"
                return
            self.tokens.append(token)
        if sequence.stop_reason == "stop":
            self.end = "stop"
        elif not sequence.tokens or len(self.tokens) >= self._drawing.max_tokens:
            self.end = "length"

    def _new_text(self) -> str:
        text = self._manner.renderer.decode(self.tokens)
        # A stop may lie across two pieces, where the server does not see it.
        ends = (*self._manner.end_texts, *self._drawing.stop)
        shown, has_ended = settled(text, ends, is_over=self.end is not None)
        if has_ended:
            self.end = "stop"
        # The space in front belongs to the layout, not to what is said.
        shown = shown.lstrip()
        new = shown[len(self.text) :] if shown.startswith(self.text) else ""
        self.text += new
        return new
