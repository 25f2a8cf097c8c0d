"""Where a sample ends: at a token, or where its text first holds one of some texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tinkex.errors import InvalidInput
from tinkex.types import SamplingParams

#: What a tokenizer writes for bytes that are not yet a character.
_UNFINISHED = "\ufffd"
#: No character has more bytes than this, so no more tokens than this can be parts of one.
_MAX_PENDING = 4
#: Tokens before the new ones that are decoded with them: some decoders join what they neighbour.
_NUM_BEFORE = 4


class Texts(Protocol):
    """Turns tokens into text."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The text of some tokens."""
        ...


class Stops(NamedTuple):
    """What ends a sample."""

    tokens: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()


def read_stops(params: SamplingParams, eos_tokens: frozenset[int], *, has_texts: bool) -> Stops:
    """Where a sample ends; a stop that is given replaces the end tokens."""
    stop = params.stop
    if stop is None:
        return Stops(eos_tokens)
    given = [stop] if isinstance(stop, str) else list(stop)
    texts = tuple(text for text in given if isinstance(text, str))
    if "" in texts:
        raise InvalidInput(f"stop has an empty text, which ends nothing: {stop!r:.80}")
    if texts and not has_texts:
        raise InvalidInput(
            "stop has texts, but this model has no tokenizer here; give token ids instead"
        )
    return Stops(frozenset(token for token in given if isinstance(token, int)), texts)


class TextWatch:
    """Reads a sample's text token by token, and says when it holds a text that ends it.

    Only the last few tokens are decoded each time, however long the sample is.
    """

    def __init__(self, decoder: Texts, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._num_kept = max(map(len, stops)) - 1
        self._tokens: list[int] = []
        """Some tokens whose text is known, then those that are pending."""
        self._num_known = 0
        self._known = ""
        """The text of the known ones among these tokens."""
        self._tail = ""
        """The end of the text so far, one character short of the longest stop."""

    def ends_with(self, token: int) -> bool:
        """Take the next token; whether the text now holds a stop."""
        self._tokens.append(token)
        text = self._decoder.decode(self._tokens)
        new = text[_common(text, self._known) :]
        found = any(stop in self._tail + new for stop in self._stops)
        is_pending = text.endswith(_UNFINISHED)
        if not is_pending or len(self._tokens) - self._num_known >= _MAX_PENDING:
            self._settle(new)
        return found

    def _settle(self, new: str) -> None:
        """Count all pending tokens as known, but for a character that may still be finished."""
        whole = self._tail + new.rstrip(_UNFINISHED)
        self._tail = whole[-self._num_kept :] if self._num_kept else ""
        self._tokens = self._tokens[-_NUM_BEFORE:]
        self._num_known = len(self._tokens)
        self._known = self._decoder.decode(self._tokens).rstrip(_UNFINISHED)


def _common(one: str, other: str) -> int:
    """How many first characters are the same."""
    if one.startswith(other):
        return len(other)
    pairs = zip(one, other, strict=False)
    differing = (index for index, (a, b) in enumerate(pairs) if a != b)
    return next(differing, min(len(one), len(other)))
