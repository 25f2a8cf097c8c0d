"""Turns the tokens of an answer into text, reasoning and tool calls while they are generated."""

from __future__ import annotations

from collections.abc import Sequence

from tinkex.server.inference.answer_events import AnswerEvent, TextDelta
from tinkex.server.inference.string_matcher import Match, StringMatcher
from tinkex.server.inference.token_texts import TokenTexts


class AnswerParser:
    """Parses one answer; the concatenated events do not depend on how the tokens are divided.

    Held back are incomplete characters and any text that may begin a stop text. Special tokens are
    not part of the text.
    """

    def __init__(
        self, texts: TokenTexts, stops: Sequence[str] = (), *, context: Sequence[int] = ()
    ) -> None:
        self.stop_text: str | None = None
        """The stop text that ended the answer."""
        self._special = texts.special
        self._decoder = texts.new_decoder(context)
        self._stops = frozenset(stops)
        self._matcher = StringMatcher(stops)

    @property
    def is_finished(self) -> bool:
        """Whether more tokens do not change the answer."""
        return self.stop_text is not None

    def feed(self, tokens: Sequence[int]) -> list[AnswerEvent]:
        """Add the next tokens; returns the parts of the answer that will not change any more."""
        parts: list[str] = []
        for token in tokens:
            if self.is_finished:
                break
            parts.append(self._cut(self._decode(token)))
            if self._special.get(token) in self._stops:
                self.stop_text = self._special[token]
        return _events("".join(parts))

    def finish(self) -> list[AnswerEvent]:
        """End the answer; returns what was held back."""
        if self.is_finished:
            return []
        text = self._cut(self._decoder.flush())
        if self.stop_text is None:
            text += self._matcher.finish()
        return _events(text)

    def _decode(self, token: int) -> str:
        if token in self._special:
            return self._decoder.flush()
        return self._decoder.push(token)

    def _cut(self, text: str) -> str:
        found = self._matcher.feed(text)
        if isinstance(found, Match):
            self.stop_text = found.string
            return found.before
        return found


def _events(text: str) -> list[AnswerEvent]:
    return [TextDelta(text)] if text else []
