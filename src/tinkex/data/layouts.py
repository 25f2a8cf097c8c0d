"""The layouts of rows that data sets use, as fields; what a row means is the reader's decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.data.jsonl import truncated_repr
from tinkex.errors import InvalidInput

#: Fields that hold a list of messages.
MESSAGE_LIST_FIELDS = ("conversations", "messages")
#: Fields of question and answer, in the layouts that have just these two.
PROMPT_RESPONSE_FIELDS = (
    ("instruction", "output"),
    ("question", "answer"),
    ("prompt", "completion"),
)
#: Fields of the better and the worse answer.
PREFERENCE_FIELDS = (("chosen", "rejected"), ("preferred", "other"))
#: Roles that mean user and assistant in every data set.
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
#: Roles as ShareGPT spells them in the field "from".
SHAREGPT_ROLES = {**ROLE_ALIASES, "function": "tool", "observation": "tool", "developer": "system"}


def check_mapping(value: Any, expected: str) -> Mapping[str, Any]:
    """A row, if it is an object."""
    if not isinstance(value, dict):
        raise InvalidInput(f"found {truncated_repr(value)}; expected {expected}")
    return value


def get_text_field(row: Mapping[str, Any], name: str, expected: str) -> str:
    """A field that must be there and hold text."""
    if name not in row:
        raise InvalidInput(
            f"there is no {name!r} among {format_field_names(row)}; expected {expected}"
        )
    if not isinstance(row[name], str):
        raise InvalidInput(f"{name} is {truncated_repr(row[name])}; expected text")
    return str(row[name])


def find_message_list_field(row: Mapping[str, Any]) -> str | None:
    """The field that holds the messages of a row; None if it has no such field."""
    return next((name for name in MESSAGE_LIST_FIELDS if name in row), None)


def to_prompt_response_messages(
    row: Mapping[str, Any], expected: str
) -> list[dict[str, str]] | None:
    """Question and answer as two messages; None if a row has no such fields."""
    for question, answer in PROMPT_RESPONSE_FIELDS:
        if question in row and answer in row:
            asked, more = get_text_field(row, question, expected), row.get("input")
            asked = f"{asked}\n{more}" if isinstance(more, str) and more else asked
            return [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": get_text_field(row, answer, expected)},
            ]
    return None


def find_preference_fields(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The fields of the better and the worse answer; None if a row has no such fields."""
    return next((both for both in PREFERENCE_FIELDS if all(name in row for name in both)), None)


def format_field_names(row: Mapping[str, Any] | Sequence[str]) -> str:
    """The fields of a row, for messages."""
    return truncated_repr(", ".join(row)) if row else "nothing"
