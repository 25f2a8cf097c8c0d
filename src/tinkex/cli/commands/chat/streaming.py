"""Streamed replies.

A server with the streaming endpoint sends tokens as it generates them. From other servers a reply
is requested in small chunks. Each chunk continues the tokens before it, so the result equals one
long request; the server's prefix cache avoids repeated prefill.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tinkex.cli.commands.sampling_options import SamplingOptions
from tinkex.cli.output.streamed_text import stable_text
from tinkex.data.rendering import Renderer, find_end_of_turn
from tinkex.errors import TinkexError
from tinkex.logs import get_logger
from tinkex.types import ModelInput

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.client.token_stream import TokenStreamer
    from tinkex.types import SampledSequence

LOG = get_logger(__name__)
#: The first chunk is small, so that text appears soon.
FIRST_CHUNK_TOKENS = 4
MAX_CHUNK_TOKENS = 64
SEEDED_CHUNK_TOKENS = 16
#: Target duration of a chunk: shorter ones waste round trips, longer ones stutter.
CHUNK_SECONDS = 0.3

EndReason = Literal["stop", "length", "interrupted"]


def next_chunk_size(size: int, seconds: float) -> int:
    """Return the size of the next chunk, given the size and duration of the last one."""
    wanted = size * CHUNK_SECONDS / max(seconds, 1e-3)
    # At most double the size, because one measurement is noisy.
    return max(1, min(round(wanted), 2 * size, MAX_CHUNK_TOKENS))


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
    """One reply, shown while it is generated."""

    def __init__(
        self,
        sampler: SamplingClient,
        prompt: Sequence[int],
        options: SamplingOptions,
        reply_format: ReplyFormat,
        streamer: TokenStreamer | None = None,
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.end_reason: EndReason | None = None
        self._sampler = sampler
        self._prompt = list(prompt)
        self._options = options
        self._reply_format = reply_format
        self._streamer = streamer
        # A stop text may span two chunks, where the server cannot detect it.
        self._end_texts = (*reply_format.end_texts, *options.stop)

    def stream(self) -> Generator[str, None, None]:
        """Yield new text as it arrives; KeyboardInterrupt cancels the request."""
        if self._streamer is not None:
            yield from self._receive_stream(self._streamer)
        # All of the reply, or what is missing after a stream that failed.
        yield from self._request_chunks()

    def _receive_stream(self, streamer: TokenStreamer) -> Iterator[str]:
        options = self._options._replace(stop=self._end_texts)
        chunks = streamer.stream(self._prompt, options.to_sampling_params())
        try:
            for chunk in chunks:
                self._append(chunk.tokens, chunk.stop_reason)
                yield from self._new_text()
                if self.end_reason is not None:
                    break
        except TinkexError as error:
            LOG.debug("The reply is not streamed: %s", error)
            if len(self.tokens) >= self._options.max_tokens:
                self._append((), "length")
                yield from self._new_text()
        finally:
            chunks.close()

    def _request_chunks(self) -> Iterator[str]:
        size = FIRST_CHUNK_TOKENS
        while self.end_reason is None:
            size = min(size, self._options.max_tokens - len(self.tokens))
            start = time.monotonic()
            sequence = self._request_chunk(size)
            is_full = len(self.tokens) + len(sequence.tokens) >= self._options.max_tokens
            is_over = sequence.stop_reason == "stop" or not sequence.tokens or is_full
            self._append(sequence.tokens, sequence.stop_reason if is_over else None)
            if self._options.seed is None:
                size = next_chunk_size(size, time.monotonic() - start)
            else:
                # Samples depend on the chunk boundaries, so these must not depend on timing.
                size = SEEDED_CHUNK_TOKENS
            yield from self._new_text()

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

    def _append(self, tokens: Sequence[int], stop_reason: EndReason | None) -> None:
        for token in tokens:
            if token in self._reply_format.end_tokens:
                self.end_reason = "stop"
                return
            self.tokens.append(token)
        self.end_reason = stop_reason

    def _new_text(self) -> Iterator[str]:
        """Yield the text that was added, if any."""
        text = self._reply_format.renderer.decode(self.tokens)
        shown, has_ended = stable_text(text, self._end_texts, is_over=self.end_reason is not None)
        if has_ended:
            self.end_reason = "stop"
        # Leading space belongs to the prompt format, not to the reply.
        shown = shown.lstrip()
        new = shown[len(self.text) :] if shown.startswith(self.text) else ""
        self.text += new
        if new:
            yield new
