"""Layouts of JSONL rows: field names, and parsers of the fields that several row kinds share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from tinkex.data.chatml import ROLES, SPECIAL_TOKENS, Message
from tinkex.data.jsonl import truncated_repr
from tinkex.errors import InvalidInput

Messages: TypeAlias = tuple[Message, ...]
#: Checks and normalizes one message; the first argument is its path within the row, for errors.
MessageParser: TypeAlias = Callable[[str, object], Message]

#: Fields that hold a list of messages.
MESSAGE_LIST_FIELDS = ("conversations", "messages")
#: Pairs of fields that hold a prompt and its response.
PROMPT_RESPONSE_FIELDS = (
    ("instruction", "output"),
    ("question", "answer"),
    ("prompt", "completion"),
)
#: Pairs of fields that hold the preferred and the rejected response.
PREFERENCE_FIELDS = (("chosen", "rejected"), ("preferred", "other"))
#: Alternative role names that are accepted everywhere.
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
#: Role names of the ShareGPT field "from".
SHAREGPT_ROLES = {**ROLE_ALIASES, "function": "tool", "observation": "tool", "developer": "system"}


# --- fields ---------------------------------------------------------------------------------


def check_mapping(value: object, expected: str) -> Mapping[str, object]:
    """Return the row, which must be an object."""
    if not isinstance(value, dict):
        raise InvalidInput(f"found {truncated_repr(value)}; expected {expected}")
    return value


def get_text_field(row: Mapping[str, object], name: str, expected: str) -> str:
    """Return a required text field."""
    if name not in row:
        raise InvalidInput(f"no field {name!r} in {format_field_names(row)}; expected {expected}")
    if not isinstance(row[name], str):
        raise InvalidInput(f"{name} is {truncated_repr(row[name])}; expected text")
    return str(row[name])


def find_preference_fields(row: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the names of the preferred and the rejected field, or None if they are missing."""
    return next((pair for pair in PREFERENCE_FIELDS if all(name in row for name in pair)), None)


def format_field_names(row: Mapping[str, object]) -> str:
    """Format the field names of a row for error messages."""
    return truncated_repr(", ".join(row)) if row else "an empty row"


def check_no_special_tokens(where: str, text: str) -> str:
    """Return the text, which must not contain ChatML delimiters: they would end its message."""
    for token in SPECIAL_TOKENS:
        if token in text:
            raise InvalidInput(f"{where} contains {token!r}, which is reserved for the template")
    return text


# --- conversations --------------------------------------------------------------------------


def find_conversation(
    row: Mapping[str, object], expected: str, parse_message: MessageParser
) -> Messages | None:
    """Return the messages of a row in any conversation layout, or None if it has none of them."""
    for name in MESSAGE_LIST_FIELDS:
        if name in row:
            return parse_messages(name, row[name], parse_message)
    for prompt_field, response_field in PROMPT_RESPONSE_FIELDS:
        if prompt_field in row and response_field in row:
            prompt, extra = get_text_field(row, prompt_field, expected), row.get("input")
            prompt = f"{prompt}\n{extra}" if isinstance(extra, str) and extra else prompt
            response = get_text_field(row, response_field, expected)
            turns = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": response},
            ]
            return parse_messages("row", turns, parse_message)
    return None


def require_assistant(messages: Messages) -> Messages:
    """Return the messages, at least one of which must be the assistant's."""
    if not any(message["role"] == "assistant" for message in messages):
        raise InvalidInput("no message has the role 'assistant', so there is nothing to learn")
    return messages


def parse_messages(name: str, value: object, parse_message: MessageParser) -> Messages:
    """Parse a non-empty list of messages."""
    if not isinstance(value, list) or not value:
        raise InvalidInput(f"{name} is {truncated_repr(value)}; expected a list of messages")
    return tuple(parse_message(f"{name}[{index}]", message) for index, message in enumerate(value))


def parse_template_message(where: str, value: object) -> Message:
    """Parse a message for the model's own chat template: any role, and extra fields stay."""
    message = _normalize_names(_check_message(where, value))
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidInput(f"{where} has no role such as 'user' or 'assistant'")
    is_tool_call = content is None and bool(message.get("tool_calls"))
    if not is_tool_call and not isinstance(content, str | list):
        raise InvalidInput(f"{where} has the content {truncated_repr(content)}; expected text")
    return message


def parse_chatml_message(where: str, value: object) -> Message:
    """Parse a message for ChatML: one of its roles, text content, and no ChatML delimiters."""
    given = _check_message(where, value)
    role = given.get("role", given.get("from"))
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise InvalidInput(f"{where} has the role {truncated_repr(role)}; expected one of {known}")
    content = given.get("content", given.get("value"))
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidInput(
            f"{where} has the tool_calls {truncated_repr(calls)}; expected a list of objects"
        )
    if calls:
        check_no_special_tokens(where, msgspec.json.encode(calls).decode())
        content = "" if content is None else content
    if not isinstance(content, str) or not (content or calls):
        raise InvalidInput(f"{where} has the content {truncated_repr(content)}; expected text")
    message: dict[str, object] = {"role": role, "content": check_no_special_tokens(where, content)}
    reasoning = given.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = check_no_special_tokens(where, reasoning)
    return {**message, "tool_calls": calls} if calls else message


def parse_tools(row: Mapping[str, object], messages: Sequence[Message]) -> tuple[object, ...]:
    """Parse the optional tool definitions of a ChatML row."""
    tools = row.get("tools") or []
    if not isinstance(tools, list):
        raise InvalidInput(f"tools is {truncated_repr(tools)}; expected a list")
    if tools and not messages:
        raise InvalidInput("the row has tools but no messages")
    check_no_special_tokens("tools", msgspec.json.encode(tools).decode())
    return tuple(tools)


def _check_message(where: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} is {truncated_repr(value)}; expected a role and a content")
    return value


def _normalize_names(message: dict[str, object]) -> dict[str, object]:
    """Convert a ShareGPT message ("from", "value") to one with role and content."""
    has_role = "role" in message
    role = message.get("role" if has_role else "from")
    if isinstance(role, str):
        # A template may define the roles "developer" and "function" itself.
        role = (ROLE_ALIASES if has_role else SHAREGPT_ROLES).get(role, role)
    if has_role and role == message["role"] and "value" not in message:
        return message
    content = message.get("content", message.get("value"))
    rest = {name: message[name] for name in message if name not in {"from", "value"}}
    return rest | {"role": role, "content": content}
