"""Streamed replies.

The API cannot stream samples, so a reply is requested in small chunks. Each chunk continues the
tokens before it, so the result equals one long request; the server's prefix cache avoids repeated
prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tinkex.cli.commands.sampling_options import SamplingOptions
from tinkex.data.rendering import Renderer, find_end_of_turn
from tinkex.types import ModelInput

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.types import SampledSequence

#: The first chunk is small, so that text appears soon.
FIRST_CHUNK_TOKENS = 4
MAX_CHUNK_TOKENS = 64
SEEDED_CHUNK_TOKENS = 16
#: Target duration of a chunk: shorter ones waste round trips, longer ones stutter.
CHUNK_SECONDS = 0.3
#: Decoded from bytes that do not form a complete character yet.
_REPLACEMENT_CHAR = "\ufffd"

EndReason = Literal["stop", "length", "interrupted"]


def next_chunk_size(size: int, seconds: float) -> int:
    """Return the size of the next chunk, given the size and duration of the last one."""
    wanted = size * CHUNK_SECONDS / max(seconds, 1e-3)
    # At most double the size, because one measurement is noisy.
    return max(1, min(round(wanted), 2 * size, MAX_CHUNK_TOKENS))


def stable_text(text: str, ends: Sequence[str], *, is_over: bool) -> tuple[str, bool]:
    """Return the part of a text that will not change, and whether a stop text was reached."""
    indices = [index for index in (text.find(end) for end in ends) if index >= 0]
    if indices:
        return text[: min(indices)], True
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
    """Renderer of a model, and the tokens and texts that end a reply."""

    renderer: Renderer
    end_tokens: frozenset[int] = frozenset()
    """In addition to the stop tokens of the server."""
    end_texts: tuple[str, ...] = ()

    @classmethod
    def for_renderer(cls, renderer: Renderer) -> ReplyFormat:
        """Use the template's end-of-turn token, or without a template the next role's name."""
        if renderer.has_template:
            return cls(renderer, frozenset(find_end_of_turn(renderer)))
        return cls(renderer, end_texts=("\nUser:", "\nSystem:"))


class StreamedReply:
    """One reply, generated chunk by chunk."""

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
        """Yield new text as it arrives; KeyboardInterrupt cancels the current chunk."""
        size = FIRST_CHUNK_TOKENS
        while self.end_reason is None:
            size = min(size, self._options.max_tokens - len(self.tokens))
            start = time.monotonic()
            self._append_chunk(self._request_chunk(size))
            if self._options.seed is None:
                size = next_chunk_size(size, time.monotonic() - start)
            else:
                # Samples depend on the chunk boundaries, so these must not depend on timing.
                size = SEEDED_CHUNK_TOKENS
            new = self._new_text()
            if new:
                yield new

    def _request_chunk(self, size: int) -> SampledSequence:
        # Reusing the seed would repeat the same random numbers in every chunk.
        seed = self._options.seed
        chunk_seed = None if seed is None else seed + len(self.tokens)
        model_input = ModelInput.from_ints([*self._prompt, *self.tokens])
        future = self._sampler.sample(
            model_input, 1, self._options.to_sampling_params(size, chunk_seed)
        )
        try:
            return future.result().sequences[0]
        except KeyboardInterrupt:
            future.cancel()
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
        # A stop text may span two chunks, where the server cannot detect it.
        ends = (*self._reply_format.end_texts, *self._options.stop)
        shown, has_ended = stable_text(text, ends, is_over=self.end_reason is not None)
        if has_ended:
            self.end_reason = "stop"
        # Leading space belongs to the prompt format, not to the reply.
        shown = shown.lstrip()
        new = shown[len(self.text) :] if shown.startswith(self.text) else ""
        self.text += new
        return new
