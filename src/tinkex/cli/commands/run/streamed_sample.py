"""A sample whose text is printed while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tinkex.cli.output.streamed_text import print_part, stable_text
from tinkex.client.token_stream import TokenChunk, TokenStreamer
from tinkex.errors import TinkexError
from tinkex.logs import get_logger
from tinkex.types import SampledSequence, SampleResponse

if TYPE_CHECKING:
    from tinkex.cli.context import Screen
    from tinkex.cli.progress import StatusSpinner
    from tinkex.client.sampling import SamplingClient
    from tinkex.text import Tokenizer
    from tinkex.types import SamplingParams

LOG = get_logger(__name__)


class SamplePrinter:
    """Prints the text of one sample as its tokens arrive."""

    def __init__(self, tokenizer: Tokenizer, screen: Screen, spinner: StatusSpinner) -> None:
        self._tokenizer = tokenizer
        self._screen = screen
        self._spinner = spinner
        self._tokens: list[int] = []
        self._num_shown_chars = 0

    def print_sample(
        self,
        sampler: SamplingClient,
        model: str,
        prompt: Sequence[int],
        params: SamplingParams,
    ) -> SampleResponse | None:
        """Print a sample and return it; None if the server does not stream it."""
        chunk = TokenChunk([])
        chunks = TokenStreamer(sampler.holder, model).stream(prompt, params)
        try:
            for chunk in chunks:
                self._add(chunk)
        except TinkexError as error:
            if self._tokens:
                raise
            LOG.debug("The sample is not streamed: %s", error)
            return None
        finally:
            chunks.close()
            self._spinner.close()
            if self._num_shown_chars or chunk.stop_reason is not None:
                click.echo("")
        sequence = SampledSequence(
            stop_reason=chunk.stop_reason or "stop", sequence_id="", _tokens_list=self._tokens
        )
        return SampleResponse([sequence])

    def _add(self, chunk: TokenChunk) -> None:
        """Print the text that the next tokens complete."""
        self._tokens.extend(chunk.tokens)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        shown, _ = stable_text(text, (), is_over=chunk.stop_reason is not None)
        if len(shown) > self._num_shown_chars:
            # The line of the spinner is where the text begins.
            self._spinner.close()
            print_part(shown[self._num_shown_chars :], self._screen)
            self._num_shown_chars = len(shown)
