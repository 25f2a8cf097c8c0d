"""What rows may look like: the layouts that are common, each read into one of three values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from tinkex.data import layouts
from tinkex.data.jsonl import truncated_repr
from tinkex.errors import InvalidInput
from tinkex.pipeline.chat import MARKS, ROLES, Message

Messages: TypeAlias = tuple[Message, ...]

_TEXT = '{"text": ...} or {"ids": [...]}'
_CHAT = (
    '{"conversations": [{"role": ..., "content": ...}, ...]}, "messages", '
    '"instruction"/"output", "question"/"answer" or "prompt"/"completion"'
)
_PAIR = (
    '{"chosen": messages, "rejected": messages}, or "prompt" with "chosen" and "rejected" '
    'or "preferred" and "other"'
)


@dataclass(frozen=True, slots=True)
class TextRow:
    """A text to be continued, or its tokens."""

    text: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation; what the assistant says is learned."""

    messages: Messages
    tools: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class PairRow:
    """Two conversations, of which the first ends better."""

    chosen: ChatRow
    rejected: ChatRow


def parse_text(value: Any) -> TextRow:
    """A row of text."""
    row = layouts.check_mapping(value, _TEXT)
    ids = row.get("ids")
    if ids is not None:
        if not isinstance(ids, list) or not ids or not all(_is_id(token) for token in ids):
            raise InvalidInput(f"ids is {truncated_repr(ids)}; expected a list of tokens")
        return TextRow("", tuple(ids))
    text = layouts.get_text_field(row, "text", _TEXT)
    if not text.strip():
        raise InvalidInput("text is empty; expected something to learn from")
    return TextRow(_unmarked("text", text))


def parse_chat(value: Any) -> ChatRow:
    """A row with a conversation, in any of the layouts."""
    row = layouts.check_mapping(value, _CHAT)
    messages = _conversation(row)
    if not any(message["role"] == "assistant" for message in messages):
        raise InvalidInput("no message has the role 'assistant', so there is nothing to learn")
    return ChatRow(messages, _tools(row, messages))


def parse_pair(value: Any) -> PairRow:
    """A row with two answers to compare."""
    row = layouts.check_mapping(value, _PAIR)
    names = layouts.find_preference_fields(row)
    if names is None:
        raise InvalidInput(f"found {_keys(row)}; expected {_PAIR}")
    asked = _asked(row)
    chosen, rejected = (_answered(asked, name, row[name]) for name in names)
    if chosen == rejected:
        raise InvalidInput(f"{names[0]} and {names[1]} are the same, so nothing is preferred")
    for name, found in zip(names, (chosen, rejected), strict=True):
        if found[-1]["role"] != "assistant":
            raise InvalidInput(f"{name} does not end with what the assistant says")
    tools = _tools(row, chosen)
    return PairRow(ChatRow(chosen, tools), ChatRow(rejected, tools))


#: How a row of each stage is read.
PARSERS: Mapping[str, Callable[[Any], TextRow | ChatRow | PairRow]] = {
    "pretrain": parse_text,
    "sft": parse_chat,
    "dpo": parse_pair,
    "r1": parse_chat,
}


def parse_any(value: Any) -> TextRow | ChatRow | PairRow:
    """A row of whichever stage, as a tokenizer is trained on all of them."""
    row = layouts.check_mapping(value, f"{_TEXT}, {_CHAT}, or {_PAIR}")
    if "text" in row or "ids" in row:
        return parse_text(row)
    if any(name in row for name in ("chosen", "preferred")):
        return parse_pair(row)
    return parse_chat(row)


# --- conversations --------------------------------------------------------------------------


def _conversation(row: Mapping[str, Any]) -> Messages:
    name = layouts.find_message_list_field(row)
    if name is not None:
        return _messages(name, row[name])
    turns = layouts.to_prompt_response_messages(row, _CHAT)
    if turns is None:
        raise InvalidInput(f"found {_keys(row)}; expected {_CHAT}")
    return _messages("row", turns)


def _asked(row: Mapping[str, Any]) -> Messages:
    asked = row.get("prompt")
    if asked is None or asked == "":
        return ()
    if isinstance(asked, str):
        return _messages("prompt", [{"role": "user", "content": asked}])
    return _messages("prompt", asked)


def _answered(asked: Messages, name: str, given: Any) -> Messages:
    if isinstance(given, str):
        if not asked:
            raise InvalidInput(f"{name} is text, and there is no prompt that it answers")
        given = [{"role": "assistant", "content": given}]
    return (*asked, *_messages(name, given))


def _messages(name: str, given: Any) -> Messages:
    if not isinstance(given, list) or not given:
        raise InvalidInput(f"{name} is {truncated_repr(given)}; expected a list of messages")
    return tuple(_message(f"{name}[{index}]", message) for index, message in enumerate(given))


def _message(where: str, given: Any) -> Message:
    if not isinstance(given, dict):
        raise InvalidInput(f"{where} is {truncated_repr(given)}; expected a role and a content")
    role = given.get("role", given.get("from"))
    role = layouts.SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise InvalidInput(
            f"{where} has the role {truncated_repr(role)}; expected one of {_list(ROLES)}"
        )
    content = given.get("content", given.get("value"))
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidInput(
            f"{where} has the tool_calls {truncated_repr(calls)}; expected a list of objects"
        )
    if calls:
        _unmarked(where, msgspec.json.encode(calls).decode())
        content = "" if content is None else content
    if not isinstance(content, str) or not (content or calls):
        raise InvalidInput(f"{where} has the content {truncated_repr(content)}; expected text")
    message: dict[str, Any] = {"role": role, "content": _unmarked(where, content)}
    thought = given.get("reasoning_content")
    if isinstance(thought, str) and thought:
        message["reasoning_content"] = _unmarked(where, thought)
    return {**message, "tool_calls": calls} if calls else message


def _tools(row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Any, ...]:
    tools = row.get("tools") or []
    if not isinstance(tools, list):
        raise InvalidInput(f"tools is {truncated_repr(tools)}; expected a list")
    if tools and not messages:
        raise InvalidInput("there are tools and no messages")
    _unmarked("tools", msgspec.json.encode(tools).decode())
    return tuple(tools)


# --- fields ---------------------------------------------------------------------------------


def _unmarked(where: str, text: str) -> str:
    """Text without the marks of a conversation, which would end it and falsify what is learned."""
    for mark in MARKS:
        if mark in text:
            raise InvalidInput(f"{where} holds {mark!r}, which only the template may write")
    return text


def _is_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and token >= 0


def _keys(row: Mapping[str, Any]) -> str:
    return f"the fields {_list(tuple(row))}" if row else "no fields"


def _list(names: Sequence[str]) -> str:
    return truncated_repr(", ".join(names))
