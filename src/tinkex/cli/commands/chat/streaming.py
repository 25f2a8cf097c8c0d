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

from tinkex.cli.commands.sampling_options import SamplingOptions
from tinkex.data.rendering import Renderer
from tinkex.data.rows import ChatRow
from tinkex.errors import InvalidInput
from tinkex.types import ModelInput

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.types import SampledSequence

#: The first piece is small, so that something is seen soon.
FIRST_CHUNK_TOKENS = 4
MAX_CHUNK_TOKENS = 64
SEEDED_CHUNK_TOKENS = 16
#: A piece should take about so long: shorter ones waste round trips, longer ones stutter.
CHUNK_SECONDS = 0.3
#: What a tokenizer writes for bytes that are not yet a character.
_REPLACEMENT_CHAR = "\ufffd"

EndReason = Literal["stop", "length", "interrupted"]


def next_chunk_size(size: int, seconds: float) -> int:
    """How many tokens the next piece should have, after one of `size` took so long."""
    wanted = size * CHUNK_SECONDS / max(seconds, 1e-3)
    # At most twice as many: one quick answer says little.
    return max(1, min(round(wanted), 2 * size, MAX_CHUNK_TOKENS))


def stable_text(text: str, ends: Sequence[str], *, is_over: bool) -> tuple[str, bool]:
    """What of a text can be shown for good, and whether it has reached one of its ends."""
    places = [place for place in (text.find(end) for end in ends) if place >= 0]
    if places:
        return text[: min(places)], True
    if is_over:
        return text, False
    shown = text.rstrip(_REPLACEMENT_CHAR)
    for end in ends:
        for length in range(min(len(end) - 1, len(shown)), 0, -1):
            if shown.endswith(end[:length]):
                shown = shown[:-length]
                break
    return shown, False


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model's answers are read, and where they end."""

    renderer: Renderer
    end_tokens: frozenset[int] = frozenset()
    """Besides the tokens that end a sample on the server."""
    end_texts: tuple[str, ...] = ()

    @classmethod
    def for_renderer(cls, renderer: Renderer) -> ReplyFormat:
        """With a chat template, the token behind an answer; without, the next speaker's name."""
        if renderer.has_template:
            return cls(renderer, frozenset(_end_of_turn_tokens(renderer)))
        return cls(renderer, end_texts=("\nUser:", "\nSystem:"))


def _end_of_turn_tokens(renderer: Renderer) -> list[int]:
    """The special token that the chat template writes behind what the assistant says."""
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    try:
        example = renderer.render_examples(ChatRow((question, answer)))[0]
    except InvalidInput:
        return []
    special = set(getattr(renderer.tokenizer, "all_special_ids", ()))
    learned = itertools.compress(example.tokens, example.is_learned)
    return [token for token in learned if token in special][-1:]


class StreamedReply:
    """One answer, piece by piece."""

    def __init__(
        self,
        sampler: SamplingClient,
        prompt: Sequence[int],
        options: SamplingOptions,
        reply_format: ReplyFormat,
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.end_reason: EndReason | None = None
        self._sampler = sampler
        self._prompt = list(prompt)
        self._options = options
        self._reply_format = reply_format

    def stream(self) -> Iterator[str]:
        """New text as it comes; KeyboardInterrupt gives up on the piece that is being made."""
        size = FIRST_CHUNK_TOKENS
        while self.end_reason is None:
            size = min(size, self._options.max_tokens - len(self.tokens))
            began = time.monotonic()
            self._append_chunk(self._request_chunk(size))
            if self._options.seed is None:
                size = next_chunk_size(size, time.monotonic() - began)
            else:
                # What is drawn depends on where pieces begin, which must not depend on the clock.
                size = SEEDED_CHUNK_TOKENS
            new = self._new_text()
            if new:
                yield new

    def _request_chunk(self, size: int) -> SampledSequence:
        # The same seed again would throw the same dice for every piece.
        seed = self._options.seed
        own_seed = None if seed is None else seed + len(self.tokens)
        model_input = ModelInput.from_ints([*self._prompt, *self.tokens])
        asked = self._sampler.sample(
            model_input, 1, self._options.to_sampling_params(size, own_seed)
        )
        try:
            return asked.result().sequences[0]
        except KeyboardInterrupt:
            asked.cancel()
            self.end_reason = "interrupted"
            raise

    def _append_chunk(self, sequence: SampledSequence) -> None:
        for token in sequence.tokens:
            if token in self._reply_format.end_tokens:
                self.end_reason = "stop"
                return
            self.tokens.append(token)
        if sequence.stop_reason == "stop":
            self.end_reason = "stop"
        elif not sequence.tokens or len(self.tokens) >= self._options.max_tokens:
            self.end_reason = "length"

    def _new_text(self) -> str:
        text = self._reply_format.renderer.decode(self.tokens)
        # A stop may lie across two pieces, where the server does not see it.
        ends = (*self._reply_format.end_texts, *self._options.stop)
        shown, has_ended = stable_text(text, ends, is_over=self.end_reason is not None)
        if has_ended:
            self.end_reason = "stop"
        # The space in front belongs to the layout, not to what is said.
        shown = shown.lstrip()
        new = shown[len(self.text) :] if shown.startswith(self.text) else ""
        self.text += new
        return new
