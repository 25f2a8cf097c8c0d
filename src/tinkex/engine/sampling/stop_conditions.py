"""Stop conditions of a sequence: stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tinkex.detokenizer import IncrementalDetokenizer, TextDecoder
from tinkex.engine.inference_request import InferenceParams
from tinkex.errors import InvalidInput
from tinkex.types import SamplingParams


class StopConditions(NamedTuple):
    """Tokens and strings that end a sequence."""

    tokens: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()


def parse_stop(
    params: SamplingParams, eos_tokens: frozenset[int], *, has_tokenizer: bool
) -> StopConditions:
    """Parse the stop parameter, which replaces the EOS tokens if given."""
    stop = params.stop if params.stop is not None else ()
    given: list[str | int] = [stop] if isinstance(stop, str) else list(stop)
    if isinstance(params, InferenceParams):
        given += [*params.stop_texts, *params.stop_token_ids]
    texts = tuple(text for text in given if isinstance(text, str))
    if "" in texts:
        raise InvalidInput(f"stop has an empty string: {given!r:.80}")
    if texts and not has_tokenizer:
        raise InvalidInput(
            "stop has strings, but this model has no tokenizer; give token ids instead"
        )
    tokens = frozenset(token for token in given if isinstance(token, int))
    return StopConditions(tokens | eos_tokens if params.stop is None else tokens, texts)


class StopTextMatcher:
    """Decodes a sequence token by token and detects stop strings."""

    def __init__(self, decoder: TextDecoder, stops: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(decoder)
        self._stops = stops
        self._tail_length = max(map(len, stops)) - 1
        self._tail = ""
        """The end of the text so far, one character shorter than the longest stop string."""

    def matches_after(self, token: int) -> bool:
        """Add the next token; returns whether the text now contains a stop string."""
        text = self._tail + self._detokenizer.push(token)
        self._tail = text[-self._tail_length :] if self._tail_length else ""
        text += self._detokenizer.pending_text
        return any(stop in text for stop in self._stops)
