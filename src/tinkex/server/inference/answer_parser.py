"""Turns the tokens of an answer into text, reasoning and tool calls while they are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tinkex.server.inference.answer_events import (
    AnswerEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from tinkex.server.inference.reasoning import ReasoningParser
from tinkex.server.inference.string_matcher import Match, StringMatcher
from tinkex.server.inference.token_texts import TokenTexts
from tinkex.server.inference.tool_parsers import ToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSyntax:
    """What is not text in the answers of a model."""

    marks: frozenset[str] = frozenset()
    """Texts of special tokens that belong to reasoning or tool calls."""
    end_texts: tuple[str, ...] = ()
    """Texts that end a turn."""
    strips_start: bool = False
    """Whether white space at the beginning is part of the format."""


class AnswerParser:
    """Parses one answer; the concatenated events do not depend on how the tokens are divided.

    Held back are incomplete characters and any text that may begin a stop text or a mark of
    reasoning or tool calls. Special tokens are not part of the text, except for such marks.
    """

    def __init__(
        self,
        texts: TokenTexts,
        stops: Sequence[str] = (),
        *,
        context: Sequence[int] = (),
        syntax: AnswerSyntax | None = None,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        forced_text: str = "",
    ) -> None:
        """`forced_text` is the beginning of the answer that is already part of the prompt."""
        syntax = syntax or AnswerSyntax()
        self.stop_text: str | None = None
        """The stop text that ended the answer."""
        self.num_reasoning_tokens = 0
        self._special = texts.special
        self._decoder = texts.new_decoder(context)
        self._stops = frozenset(stops)
        self._matcher = StringMatcher([*stops, *syntax.end_texts])
        self._has_ended = False
        self._strips_start = syntax.strips_start
        self._marks = syntax.marks
        self._reasoning = reasoning
        self._tools = tools
        self._first_events = self._parse_visible(forced_text)

    @property
    def is_finished(self) -> bool:
        """Whether more tokens do not change the answer."""
        return self._has_ended or (self._tools is not None and self._tools.is_finished)

    @property
    def has_tool_calls(self) -> bool:
        """Whether the answer contains at least one tool call."""
        return self._tools is not None and self._tools.num_calls > 0

    def feed(self, tokens: Sequence[int]) -> list[AnswerEvent]:
        """Add the next tokens; returns the parts of the answer that will not change any more."""
        events, self._first_events = self._first_events, []
        for token in tokens:
            if self.is_finished:
                break
            events += self._feed_token(token)
        return merge_deltas(events)

    def finish(self) -> list[AnswerEvent]:
        """End the answer; returns what was held back."""
        events, self._first_events = self._first_events, []
        if not self.is_finished:
            events += self._parse(self._cut(self._decoder.flush()))
        if not self._has_ended:
            events += self._parse(self._matcher.finish())
        if self._reasoning is not None:
            events += self._split(self._reasoning.finish())
        if self._tools is not None:
            events += self._tools.finish()
        return merge_deltas(events)

    def _feed_token(self, token: int) -> list[AnswerEvent]:
        was_inside = self._is_in_reasoning
        events = self._parse(self._cut(self._decode(token)))
        if self._special.get(token) in self._stops:
            self._end(self._special[token])
        self.num_reasoning_tokens += was_inside or self._is_in_reasoning
        return events

    @property
    def _is_in_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_inside

    def _decode(self, token: int) -> str:
        special = self._special.get(token)
        if special is None:
            return self._decoder.push(token)
        return self._decoder.flush() + (special if special in self._marks else "")

    def _cut(self, text: str) -> str:
        found = self._matcher.feed(text)
        if isinstance(found, Match):
            self._end(found.string)
            return found.before
        return found

    def _end(self, text: str) -> None:
        self._has_ended = True
        self.stop_text = text if text in self._stops else None

    def _parse(self, text: str) -> list[AnswerEvent]:
        if self._reasoning is None:
            return self._parse_visible(text)
        return self._split(self._reasoning.feed(text))

    def _split(self, parts: Sequence[ReasoningDelta | TextDelta]) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        for part in parts:
            if isinstance(part, ReasoningDelta):
                events.append(part)
            else:
                events += self._parse_visible(part.text)
        return events

    def _parse_visible(self, text: str) -> list[AnswerEvent]:
        if self._strips_start:
            text = text.lstrip()
            self._strips_start = not text
        if self._tools is not None:
            return self._tools.feed(text)
        return [TextDelta(text)] if text else []


def merge_deltas(events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    """Join neighbouring deltas of the same kind."""
    if len(events) < 2:
        return list(events)
    merged: list[AnswerEvent] = []
    for (kind, index), group in groupby(events, key=_kind_of):
        if kind is TextDelta or kind is ReasoningDelta:
            merged.append(kind("".join(e.text for e in group if isinstance(e, kind))))
        elif kind is ToolCallDelta:
            pieces = [event.arguments for event in group if isinstance(event, ToolCallDelta)]
            merged.append(ToolCallDelta(index, "".join(pieces)))
        else:
            merged.extend(group)
    return merged


def _kind_of(event: AnswerEvent) -> tuple[type[AnswerEvent], int]:
    return type(event), -1 if isinstance(event, TextDelta | ReasoningDelta) else event.index
