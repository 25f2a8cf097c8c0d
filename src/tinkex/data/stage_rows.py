"""What rows may look like: the layouts that are common, each read into one of three values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from tinkex.data import layouts
from tinkex.data.chatml import ROLES, SPECIAL_TOKENS, Message
from tinkex.data.jsonl import truncated_repr
from tinkex.errors import InvalidInput

Messages: TypeAlias = tuple[Message, ...]

_TEXT_LAYOUT = '{"text": ...} or {"ids": [...]}'
_CHAT_LAYOUT = (
    '{"conversations": [{"role": ..., "content": ...}, ...]}, "messages", '
    '"instruction"/"output", "question"/"answer" or "prompt"/"completion"'
)
_PAIR_LAYOUT = (
    '{"chosen": messages, "rejected": messages}, or "prompt" with "chosen" and "rejected" '
    'or "preferred" and "other"'
)


@dataclass(frozen=True, slots=True)
class TextRow:
    """A text to be continued, or its tokens."""

    text: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """A conversation; what the assistant says is learned."""

    messages: Messages
    tools: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class PreferencePairRow:
    """Two conversations, of which the first ends better."""

    chosen: ConversationRow
    rejected: ConversationRow


def parse_text_row(value: Any) -> TextRow:
    """A row of text."""
    row = layouts.check_mapping(value, _TEXT_LAYOUT)
    ids = row.get("ids")
    if ids is not None:
        if not isinstance(ids, list) or not ids or not all(_is_token_id(token) for token in ids):
            raise InvalidInput(f"ids is {truncated_repr(ids)}; expected a list of tokens")
        return TextRow("", tuple(ids))
    text = layouts.get_text_field(row, "text", _TEXT_LAYOUT)
    if not text.strip():
        raise InvalidInput("text is empty; expected something to learn from")
    return TextRow(_check_no_special_tokens("text", text))


def parse_conversation_row(value: Any) -> ConversationRow:
    """A row with a conversation, in any of the layouts."""
    row = layouts.check_mapping(value, _CHAT_LAYOUT)
    messages = _conversation(row)
    if not any(message["role"] == "assistant" for message in messages):
        raise InvalidInput("no message has the role 'assistant', so there is nothing to learn")
    return ConversationRow(messages, _tools(row, messages))


def parse_pair_row(value: Any) -> PreferencePairRow:
    """A row with two answers to compare."""
    row = layouts.check_mapping(value, _PAIR_LAYOUT)
    names = layouts.find_preference_fields(row)
    if names is None:
        raise InvalidInput(f"found {_describe_fields(row)}; expected {_PAIR_LAYOUT}")
    asked = _prompt_messages(row)
    chosen, rejected = (_with_answer(asked, name, row[name]) for name in names)
    if chosen == rejected:
        raise InvalidInput(f"{names[0]} and {names[1]} are the same, so nothing is preferred")
    for name, found in zip(names, (chosen, rejected), strict=True):
        if found[-1]["role"] != "assistant":
            raise InvalidInput(f"{name} does not end with what the assistant says")
    tools = _tools(row, chosen)
    return PreferencePairRow(ConversationRow(chosen, tools), ConversationRow(rejected, tools))


#: How a row of each stage is read.
STAGE_PARSERS: Mapping[str, Callable[[Any], TextRow | ConversationRow | PreferencePairRow]] = {
    "pretrain": parse_text_row,
    "sft": parse_conversation_row,
    "dpo": parse_pair_row,
    "r1": parse_conversation_row,
}


def parse_any_row(value: Any) -> TextRow | ConversationRow | PreferencePairRow:
    """A row of whichever stage, as a tokenizer is trained on all of them."""
    row = layouts.check_mapping(value, f"{_TEXT_LAYOUT}, {_CHAT_LAYOUT}, or {_PAIR_LAYOUT}")
    if "text" in row or "ids" in row:
        return parse_text_row(row)
    if any(name in row for name in ("chosen", "preferred")):
        return parse_pair_row(row)
    return parse_conversation_row(row)


# --- conversations --------------------------------------------------------------------------


def _conversation(row: Mapping[str, Any]) -> Messages:
    name = layouts.find_message_list_field(row)
    if name is not None:
        return _messages(name, row[name])
    turns = layouts.to_prompt_response_messages(row, _CHAT_LAYOUT)
    if turns is None:
        raise InvalidInput(f"found {_describe_fields(row)}; expected {_CHAT_LAYOUT}")
    return _messages("row", turns)


def _prompt_messages(row: Mapping[str, Any]) -> Messages:
    asked = row.get("prompt")
    if asked is None or asked == "":
        return ()
    if isinstance(asked, str):
        return _messages("prompt", [{"role": "user", "content": asked}])
    return _messages("prompt", asked)


def _with_answer(asked: Messages, name: str, given: Any) -> Messages:
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
            f"{where} has the role {truncated_repr(role)}; expected one of {_join_names(ROLES)}"
        )
    content = given.get("content", given.get("value"))
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidInput(
            f"{where} has the tool_calls {truncated_repr(calls)}; expected a list of objects"
        )
    if calls:
        _check_no_special_tokens(where, msgspec.json.encode(calls).decode())
        content = "" if content is None else content
    if not isinstance(content, str) or not (content or calls):
        raise InvalidInput(f"{where} has the content {truncated_repr(content)}; expected text")
    message: dict[str, Any] = {"role": role, "content": _check_no_special_tokens(where, content)}
    thought = given.get("reasoning_content")
    if isinstance(thought, str) and thought:
        message["reasoning_content"] = _check_no_special_tokens(where, thought)
    return {**message, "tool_calls": calls} if calls else message


def _tools(row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Any, ...]:
    tools = row.get("tools") or []
    if not isinstance(tools, list):
        raise InvalidInput(f"tools is {truncated_repr(tools)}; expected a list")
    if tools and not messages:
        raise InvalidInput("there are tools and no messages")
    _check_no_special_tokens("tools", msgspec.json.encode(tools).decode())
    return tuple(tools)


# --- fields ---------------------------------------------------------------------------------


def _check_no_special_tokens(where: str, text: str) -> str:
    """Text without the marks of a conversation, which would end it and falsify what is learned."""
    for mark in SPECIAL_TOKENS:
        if mark in text:
            raise InvalidInput(f"{where} holds {mark!r}, which only the template may write")
    return text


def _is_token_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and token >= 0


def _describe_fields(row: Mapping[str, Any]) -> str:
    return f"the fields {_join_names(tuple(row))}" if row else "no fields"


def _join_names(names: Sequence[str]) -> str:
    return truncated_repr(", ".join(names))
