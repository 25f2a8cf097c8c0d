"""Decodes a sequence of tokens to text, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

#: What a tokenizer returns for incomplete or invalid UTF-8.
REPLACEMENT_CHAR = "\ufffd"
#: The maximum number of bytes, and so of tokens, of one character.
_MAX_PENDING = 4
#: Earlier tokens that are decoded with new ones, because some decoders depend on the context.
_NUM_CONTEXT_TOKENS = 4


class TextDecoder(Protocol):
    """Decodes tokens to text."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The text of tokens."""
        ...


class IncrementalDetokenizer:
    """Returns the new text of each token; incomplete characters are held back.

    Decodes only the last few tokens each time, independent of the length of the sequence.
    """

    def __init__(self, decoder: TextDecoder, context: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._tokens = list(context[-_NUM_CONTEXT_TOKENS:])
        """The last tokens with known text, then pending tokens."""
        self._num_known = len(self._tokens)
        self._known_text = decoder.decode(self._tokens) if self._tokens else ""
        """The text of the known tokens in `_tokens`."""
        self.pending_text = ""
        """The text of the tokens whose text was not returned yet; it may change."""

    def push(self, token: int) -> str:
        """Add the next token; returns the text that will not change any more."""
        self._tokens.append(token)
        text = self._decoder.decode(self._tokens)
        new_text = text[_common_prefix_length(text, self._known_text) :]
        is_pending = new_text.endswith(REPLACEMENT_CHAR)
        if is_pending and len(self._tokens) - self._num_known < _MAX_PENDING:
            self.pending_text = new_text
            return ""
        return self._commit_before_incomplete(text) if is_pending else self._commit(new_text)

    def flush(self) -> str:
        """Return the pending text at the end of the sequence or before a special token."""
        text, self.pending_text = self.pending_text, ""
        if text:
            # Later tokens must not complete a character that was returned as incomplete.
            self._tokens = []
            self._keep_context("")
        return text

    def _commit_before_incomplete(self, text: str) -> str:
        """Return the text before an incomplete last character, which at most three tokens have."""
        for count in range(_MAX_PENDING - 1, 0, -1):
            complete, pending = self._tokens[:-count], self._tokens[-count:]
            start, end = self._decoder.decode(complete), self._decoder.decode(pending)
            if start + end == text:
                new_text = start[_common_prefix_length(start, self._known_text) :]
                self._tokens = complete
                self._keep_context("")
                self._tokens += pending
                self.pending_text = end
                return new_text
        return self._commit(text[_common_prefix_length(text, self._known_text) :])

    def _commit(self, new_text: str) -> str:
        """Return the new text without an incomplete last character, whose tokens stay pending."""
        complete = new_text.rstrip(REPLACEMENT_CHAR)
        # Some decoders return one replacement character per byte, and at most three can be
        # the beginning of a character.
        num_invalid = max(0, len(new_text) - len(complete) - (_MAX_PENDING - 1))
        complete = new_text[: len(complete) + num_invalid]
        self.pending_text = new_text[len(complete) :]
        self._keep_context(self.pending_text)
        return complete

    def _keep_context(self, pending_text: str) -> None:
        self._tokens = self._tokens[-_NUM_CONTEXT_TOKENS:]
        text = self._decoder.decode(self._tokens)
        while REPLACEMENT_CHAR in text and not pending_text and len(self._tokens) > 1:
            # A context that begins within a character changes the text of all bytes in some
            # decoders.
            self._tokens = self._tokens[1:]
            text = self._decoder.decode(self._tokens)
        self._num_known = len(self._tokens)
        self._known_text = text.removesuffix(pending_text)


def _common_prefix_length(one: str, other: str) -> int:
    """The length of the common prefix."""
    if one.startswith(other):
        return len(other)
    pairs = zip(one, other, strict=False)
    differing = (index for index, (a, b) in enumerate(pairs) if a != b)
    return next(differing, min(len(one), len(other)))
