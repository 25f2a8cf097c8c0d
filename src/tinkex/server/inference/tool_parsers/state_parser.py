"""The base of the parsers: states that consume text one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from tinkex.server.inference.answer_events import AnswerEvent
from tinkex.server.inference.string_matcher import Expected, ExpectedMarks, Match, StringMatcher
from tinkex.server.inference.tool_parsers.call_object import CallObject
from tinkex.server.inference.tool_parsers.call_parts import CallWriter, OfferedTools

#: A state consumes the beginning of a text and returns the rest.
StateFunction = Callable[[str], str]


class StateParser(ABC):
    """Feeds text to the current state until all of it is consumed.

    Text that is not a call is given back at most once, so the time is linear.
    """

    def __init__(self, tools: OfferedTools, marks: tuple[str, ...] = ()) -> None:
        self._writer = CallWriter(tools)
        self._marks = StringMatcher(marks)
        self._state: StateFunction = self._in_text
        self._raw = ""
        """The beginning of a possible call, which is text if it is not a call."""
        self._expected = ExpectedMarks()
        self._on_expected: Callable[[Expected], str] = self._on_mismatch
        self._object = CallObject(self._writer)

    @property
    def is_finished(self) -> bool:
        """Whether the rest of the answer is ignored."""
        return self._writer.is_finished

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        return self._writer.num_calls

    def feed(self, text: str) -> list[AnswerEvent]:
        """Add the next part of the answer."""
        while text and not self.is_finished:
            text = self._state(text)
        return self._writer.take_events()

    def finish(self) -> list[AnswerEvent]:
        """End the answer; what is not a call is text."""
        if not self.is_finished:
            self._finish_state()
        return self._writer.finish()

    @abstractmethod
    def _on_mark(self, mark: str) -> None:
        """Handle a mark in the text."""

    @abstractmethod
    def _after_object(self) -> None:
        """Continue after a call that is an object."""

    # --- text -------------------------------------------------------------------------------

    def _in_text(self, text: str) -> str:
        found = self._marks.feed(text)
        if not isinstance(found, Match):
            self._writer.add_text(found)
            return ""
        self._writer.add_text(found.before)
        self._raw = found.string
        self._on_mark(found.string)
        return found.rest

    def _give_up(self, rest: str = "") -> str:
        """Continue with text, of which the beginning of a possible call is a part."""
        self._writer.add_text(self._raw)
        self._raw = ""
        self._state = self._in_text
        return rest

    def _finish_state(self) -> None:
        """Handle the end of the answer in the current state."""
        if self._state == self._in_text:
            self._writer.add_text(self._marks.finish())
        elif self._state == self._in_expected:
            self._writer.add_text(self._raw + self._expected.finish())
        elif self._state == self._in_object:
            held = self._object.finish()
            self._writer.add_text(self._raw + held if held else "")

    # --- expected marks ---------------------------------------------------------------------

    def _expect(self, *marks: str, then: Callable[[Expected], str]) -> None:
        """Skip white space, and call `then` with the mark or the other text that follows."""
        self._expected = ExpectedMarks(*marks)
        self._on_expected = then
        self._state = self._in_expected

    def _in_expected(self, text: str) -> str:
        found = self._expected.feed(text)
        return "" if found is None else self._on_expected(found)

    def _on_mismatch(self, found: Expected) -> str:
        return self._give_up(found.skipped + (found.mark or "") + found.rest)

    # --- calls that are objects -------------------------------------------------------------

    def _expect_object(self) -> None:
        self._expect("{", then=self._on_object)

    def _on_object(self, found: Expected) -> str:
        if found.mark is None:
            return self._on_mismatch(found)
        self._raw += found.skipped
        self._object = CallObject(self._writer)
        self._state = self._in_object
        return "{" + found.rest

    def _in_object(self, text: str) -> str:
        rest = self._object.feed(text)
        if rest is None:
            return ""
        if self._object.raw is not None:
            self._raw += self._object.raw
            return self._give_up(rest)
        self._raw = ""
        self._after_object()
        return rest
