"""Stop conditions of a sequence: stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tinkex.engine.inference_request import InferenceParams
from tinkex.errors import InvalidInput
from tinkex.types import SamplingParams

#: What a tokenizer returns for incomplete UTF-8 bytes.
_REPLACEMENT_CHAR = "\ufffd"
#: The maximum number of bytes, and so of tokens, of one character.
_MAX_PENDING = 4
#: Earlier tokens that are decoded with new ones, because some decoders depend on the context.
_NUM_CONTEXT_TOKENS = 4


class TextDecoder(Protocol):
    """Decodes tokens to text."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The text of tokens."""
        ...


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
    """Decodes a sequence token by token and detects stop strings.

    Decodes only the last few tokens each time, independent of the length of the sequence.
    """

    def __init__(self, decoder: TextDecoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._tail_length = max(map(len, stops)) - 1
        self._tokens: list[int] = []
        """The last tokens with known text, then pending tokens."""
        self._num_known = 0
        self._known_text = ""
        """The text of the known tokens in `_tokens`."""
        self._tail = ""
        """The end of the text so far, one character shorter than the longest stop string."""

    def matches_after(self, token: int) -> bool:
        """Add the next token; returns whether the text now contains a stop string."""
        self._tokens.append(token)
        text = self._decoder.decode(self._tokens)
        new_text = text[_common_prefix_length(text, self._known_text) :]
        is_match = any(stop in self._tail + new_text for stop in self._stops)
        is_pending = text.endswith(_REPLACEMENT_CHAR)
        if not is_pending or len(self._tokens) - self._num_known >= _MAX_PENDING:
            self._commit_text(new_text)
        return is_match

    def _commit_text(self, new_text: str) -> None:
        """Mark all pending tokens as known, except for an incomplete last character."""
        complete = self._tail + new_text.rstrip(_REPLACEMENT_CHAR)
        self._tail = complete[-self._tail_length :] if self._tail_length else ""
        self._tokens = self._tokens[-_NUM_CONTEXT_TOKENS:]
        self._num_known = len(self._tokens)
        self._known_text = self._decoder.decode(self._tokens).rstrip(_REPLACEMENT_CHAR)


def _common_prefix_length(one: str, other: str) -> int:
    """The length of the common prefix."""
    if one.startswith(other):
        return len(other)
    pairs = zip(one, other, strict=False)
    differing = (index for index, (a, b) in enumerate(pairs) if a != b)
    return next(differing, min(len(one), len(other)))
