"""Where a sample ends: at a token, or where its text first holds one of some texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tinkex.errors import InvalidInput
from tinkex.types import SamplingParams

#: What a tokenizer writes for bytes that are not yet a character.
_REPLACEMENT_CHAR = "\ufffd"
#: No character has more bytes than this, so no more tokens than this can be parts of one.
_MAX_PENDING = 4
#: Tokens before the new ones that are decoded with them: some decoders join what they neighbour.
_NUM_CONTEXT_TOKENS = 4


class TextDecoder(Protocol):
    """Turns tokens into text."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The text of some tokens."""
        ...


class StopConditions(NamedTuple):
    """What ends a sample."""

    tokens: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()


def parse_stop(
    params: SamplingParams, eos_tokens: frozenset[int], *, has_tokenizer: bool
) -> StopConditions:
    """Where a sample ends; a stop that is given replaces the end tokens."""
    stop = params.stop
    if stop is None:
        return StopConditions(eos_tokens)
    given = [stop] if isinstance(stop, str) else list(stop)
    texts = tuple(text for text in given if isinstance(text, str))
    if "" in texts:
        raise InvalidInput(f"stop has an empty text, which ends nothing: {stop!r:.80}")
    if texts and not has_tokenizer:
        raise InvalidInput(
            "stop has texts, but this model has no tokenizer here; give token ids instead"
        )
    return StopConditions(frozenset(token for token in given if isinstance(token, int)), texts)


class StopTextMatcher:
    """Reads a sample's text token by token, and says when it holds a text that ends it.

    Only the last few tokens are decoded each time, however long the sample is.
    """

    def __init__(self, decoder: TextDecoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._tail_length = max(map(len, stops)) - 1
        self._tokens: list[int] = []
        """Some tokens whose text is known, then those that are pending."""
        self._num_known = 0
        self._known_text = ""
        """The text of the known ones among these tokens."""
        self._tail = ""
        """The end of the text so far, one character short of the longest stop."""

    def matches_after(self, token: int) -> bool:
        """Take the next token; whether the text now holds a stop."""
        self._tokens.append(token)
        text = self._decoder.decode(self._tokens)
        new = text[_common_prefix_length(text, self._known_text) :]
        found = any(stop in self._tail + new for stop in self._stops)
        is_pending = text.endswith(_REPLACEMENT_CHAR)
        if not is_pending or len(self._tokens) - self._num_known >= _MAX_PENDING:
            self._commit_text(new)
        return found

    def _commit_text(self, new_text: str) -> None:
        """Count all pending tokens as known, but for a character that may still be finished."""
        whole = self._tail + new_text.rstrip(_REPLACEMENT_CHAR)
        self._tail = whole[-self._tail_length :] if self._tail_length else ""
        self._tokens = self._tokens[-_NUM_CONTEXT_TOKENS:]
        self._num_known = len(self._tokens)
        self._known_text = self._decoder.decode(self._tokens).rstrip(_REPLACEMENT_CHAR)


def _common_prefix_length(one: str, other: str) -> int:
    """How many first characters are the same."""
    if one.startswith(other):
        return len(other)
    pairs = zip(one, other, strict=False)
    differing = (index for index, (a, b) in enumerate(pairs) if a != b)
    return next(differing, min(len(one), len(other)))
