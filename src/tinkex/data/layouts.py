"""The layouts of rows that data sets use, as fields; what a row means is the reader's decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.data.jsonl import shown
from tinkex.errors import InvalidInput

#: Fields that hold a list of messages.
CONVERSATIONS = ("conversations", "messages")
#: Fields of question and answer, in the layouts that have just these two.
TURNS = (("instruction", "output"), ("question", "answer"), ("prompt", "completion"))
#: Fields of the better and the worse answer.
ANSWERS = (("chosen", "rejected"), ("preferred", "other"))
#: Roles that mean user and assistant in every data set.
SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
#: Roles as ShareGPT spells them in the field "from".
ROLES = {**SPEAKERS, "function": "tool", "observation": "tool", "developer": "system"}


def as_mapping(value: Any, expected: str) -> Mapping[str, Any]:
    """A row, if it is an object."""
    if not isinstance(value, dict):
        raise InvalidInput(f"found {shown(value)}; expected {expected}")
    return value


def text_field(row: Mapping[str, Any], name: str, expected: str) -> str:
    """A field that must be there and hold text."""
    if name not in row:
        raise InvalidInput(f"there is no {name!r} among {field_names(row)}; expected {expected}")
    if not isinstance(row[name], str):
        raise InvalidInput(f"{name} is {shown(row[name])}; expected text")
    return str(row[name])


def conversation_field(row: Mapping[str, Any]) -> str | None:
    """The field that holds the messages of a row; None if it has no such field."""
    return next((name for name in CONVERSATIONS if name in row), None)


def turns_of(row: Mapping[str, Any], expected: str) -> list[dict[str, str]] | None:
    """Question and answer as two messages; None if a row has no such fields."""
    for question, answer in TURNS:
        if question in row and answer in row:
            asked, more = text_field(row, question, expected), row.get("input")
            asked = f"{asked}\n{more}" if isinstance(more, str) and more else asked
            return [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": text_field(row, answer, expected)},
            ]
    return None


def answers_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The fields of the better and the worse answer; None if a row has no such fields."""
    return next((both for both in ANSWERS if all(name in row for name in both)), None)


def field_names(row: Mapping[str, Any] | Sequence[str]) -> str:
    """The fields of a row, for messages."""
    return shown(", ".join(row)) if row else "nothing"
