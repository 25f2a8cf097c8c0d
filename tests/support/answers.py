"""Parsed answers for comparison: the texts of all parts, joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tinkex.server.inference.answer_events import (
    AnswerEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass
class Collected:
    """What an answer contains."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""
    ended: list[int] = field(default_factory=list)
    """Indices of the calls that are complete."""
    order: list[tuple[str, int]] = field(default_factory=list)
    """The kinds of the parts, without repetitions."""


def collect(events: Iterable[AnswerEvent]) -> Collected:
    """Join events, and check that calls begin before their arguments and end after them."""
    answer = Collected()
    for event in events:
        kind = (type(event).__name__, getattr(event, "index", -1))
        if answer.order[-1:] != [kind]:
            answer.order.append(kind)
        if isinstance(event, TextDelta):
            assert event.text
            answer.text += event.text
        elif isinstance(event, ReasoningDelta):
            assert event.text
            answer.reasoning += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(answer.calls)
            answer.calls.append((event.name, ""))
        elif isinstance(event, ToolCallDelta):
            assert event.index == len(answer.calls) - 1 and event.index not in answer.ended
            name, before = answer.calls[-1]
            answer.calls[-1] = (name, before + event.arguments)
        elif isinstance(event, ToolCallEnd):
            assert event.index == len(answer.calls) - 1
            answer.ended.append(event.index)
    return answer


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    """Divide a text into pieces of these sizes, and the rest."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [piece for piece in (*pieces, text[start:]) if piece]
