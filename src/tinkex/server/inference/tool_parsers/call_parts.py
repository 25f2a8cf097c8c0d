"""What the parsers of all families share: events of calls, and the text around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinkex.server.inference.answer_events import (
    AnswerEvent,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The functions that an answer may call."""

    schemas: Mapping[str, Mapping[str, object]]
    """The JSON schemas of their arguments, by name."""
    has_parallel_calls: bool = True
    """Otherwise the answer ends after the first call."""

    @classmethod
    def from_tools(
        cls, tools: Sequence[Mapping[str, object]], *, has_parallel_calls: bool = True
    ) -> OfferedTools:
        """Read tools in the form of OpenAI."""
        schemas: dict[str, Mapping[str, object]] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping):
                parameters = function.get("parameters")
                schemas[str(function.get("name"))] = (
                    parameters if isinstance(parameters, Mapping) else {}
                )
        return cls(schemas, has_parallel_calls)


class ToolParser(Protocol):
    """Separates the tool calls of an answer from its text."""

    @property
    def is_finished(self) -> bool:
        """Whether the rest of the answer is ignored."""
        ...

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        ...

    def feed(self, text: str) -> list[AnswerEvent]:
        """Add the next part of the answer."""
        ...

    def finish(self) -> list[AnswerEvent]:
        """End the answer; what is not a call is text."""
        ...


class CallWriter:
    """Collects the events of an answer.

    White space next to calls is part of the format, so it is held back until text follows.
    """

    def __init__(self, tools: OfferedTools) -> None:
        self._tools = tools
        self._events: list[AnswerEvent] = []
        self._spaces: list[str] = []
        self._follows_call = False
        self.num_calls = 0
        self.num_complete_calls = 0

    @property
    def is_finished(self) -> bool:
        """Whether the only call that is allowed is complete."""
        return self.num_complete_calls > 0 and not self._tools.has_parallel_calls

    def is_offered(self, name: str) -> bool:
        """Whether a function may be called."""
        return name in self._tools.schemas

    def add_text(self, text: str) -> None:
        """Add text; its trailing white space is held back."""
        shown = text.rstrip()
        if shown:
            self._events.append(TextDelta("".join([*self._spaces, shown])))
            self._spaces = []
            self._follows_call = False
        if len(shown) < len(text):
            self._spaces.append(text[len(shown) :])

    def start_call(self, name: str) -> None:
        """Begin a call."""
        self._spaces = []
        self._events.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1

    def add_arguments(self, arguments: str) -> None:
        """Add the next part of the arguments of the current call."""
        if arguments:
            self._events.append(ToolCallDelta(self.num_calls - 1, arguments))

    def end_call(self) -> None:
        """End the current call."""
        self._follows_call = True
        self._events.append(ToolCallEnd(self.num_calls - 1))
        self.num_complete_calls += 1

    def add_call(self, name: str, arguments: str) -> None:
        """Add a whole call."""
        self.start_call(name)
        self.add_arguments(arguments)
        self.end_call()

    def take_events(self) -> list[AnswerEvent]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events

    def finish(self) -> list[AnswerEvent]:
        """Return the last events, with white space at the end of the text."""
        if self._spaces and not self._follows_call:
            self._events.append(TextDelta("".join(self._spaces)))
        self._spaces = []
        return self.take_events()
