"""Parts of an answer in the order they are generated; both API families are written from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next part of the visible text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next part of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of the arguments of a tool call, as JSON text."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The arguments of a tool call are complete."""

    index: int


AnswerEvent: TypeAlias = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
