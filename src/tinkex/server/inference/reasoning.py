"""Separates the reasoning of an answer from its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tinkex.server.inference.answer_events import ReasoningDelta, TextDelta
from tinkex.server.inference.string_matcher import ExpectedMarks, StringMatcher


class ReasoningMarks(NamedTuple):
    """The texts before and after reasoning."""

    start: str
    end: str


#: The marks of different model families.
KNOWN_MARKS = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
)


def find_reasoning_marks(template: str) -> ReasoningMarks:
    """Return the marks that a chat template contains; without any, those of most models."""
    return next((marks for marks in KNOWN_MARKS if marks.end in template), KNOWN_MARKS[0])


def ends_in_reasoning(prompt: str, marks: ReasoningMarks) -> bool:
    """Whether the generation prompt begins reasoning that the answer continues."""
    return prompt.rstrip().endswith(marks.start)


class ReasoningParser:
    """Parses reasoning at the beginning of an answer.

    Newlines next to the marks are part of the format. Reasoning without an end is still reasoning.
    """

    def __init__(self, marks: ReasoningMarks, *, starts_in_reasoning: bool = False) -> None:
        self.is_inside = starts_in_reasoning
        self._marks = marks
        # A model may repeat the mark that its prompt already contains.
        self._start = ExpectedMarks(marks.start)
        self._end = StringMatcher([marks.end])
        self._newlines: list[str] = []
        self._parts: list[ReasoningDelta | TextDelta] = []
        self._has_reasoning = False
        self._handle: Callable[[str], str] = self._before

    def feed(self, text: str) -> list[ReasoningDelta | TextDelta]:
        """Add the next part of the answer."""
        while text:
            text = self._handle(text)
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[ReasoningDelta | TextDelta]:
        """End the answer; returns what was held back."""
        held = ""
        if self._handle == self._before:
            self._handle = self._inside if self.is_inside else self._text
            held = self._start.finish()
        parts = self.feed(held)
        if self._handle == self._inside:
            self._add_reasoning(self._end.finish())
            self._add_part(ReasoningDelta("".join(self._newlines)))
        return [*parts, *self.feed("")]

    def _before(self, text: str) -> str:
        found = self._start.feed(text)
        if found is None:
            return ""
        if found.mark is not None:
            self.is_inside = True
        self._handle = self._inside if self.is_inside else self._text
        return found.rest if found.mark is not None else found.skipped + found.rest

    def _inside(self, text: str) -> str:
        found = self._end.feed(text)
        if isinstance(found, str):
            self._add_reasoning(found)
            return ""
        self._add_reasoning(found.before)
        self.is_inside = False
        self._handle = self._after
        return found.rest

    def _after(self, text: str) -> str:
        text = text.lstrip("\n")
        if text:
            self._handle = self._text
        return text

    def _text(self, text: str) -> str:
        self._add_part(TextDelta(text))
        return ""

    def _add_reasoning(self, text: str) -> None:
        """Add reasoning; newlines at its end are held back, and those at its start are dropped."""
        shown = text.rstrip("\n")
        newlines = text[len(shown) :]
        if not self._has_reasoning:
            shown = shown.lstrip("\n")
            newlines = newlines if shown else ""
        if shown:
            self._add_part(ReasoningDelta("".join([*self._newlines, shown])))
            self._newlines = []
            self._has_reasoning = True
        if newlines:
            self._newlines.append(newlines)

    def _add_part(self, part: ReasoningDelta | TextDelta) -> None:
        if part.text:
            self._parts.append(part)
