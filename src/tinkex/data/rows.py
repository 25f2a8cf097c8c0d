"""Rows that recipes learn from: the layouts of `tinkex.data.layouts`, each read into one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tinkex.data import layouts
from tinkex.data.jsonl import truncated_repr
from tinkex.errors import InvalidInput

Messages: TypeAlias = tuple[Mapping[str, Any], ...]
#: Plain text, or a conversation that the model is to go on with.
Prompt: TypeAlias = str | Messages

_CHAT_LAYOUT = '{"messages": [{"role": ..., "content": ...}, ...]}'
_SFT_LAYOUT = (
    f'{_CHAT_LAYOUT}, "conversations", "instruction"/"output", "question"/"answer" or '
    '{"prompt": text, "completion": text}'
)
_PAIR_LAYOUT = '{"prompt": text or messages, "chosen": text, "rejected": text}'
_PROMPT_LAYOUT = '{"prompt": text or messages, ...}'


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation; what the assistant says is learned."""

    messages: Messages


@dataclass(frozen=True, slots=True)
class PromptCompletionRow:
    """A text and how it goes on; the completion is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """Two answers to a prompt, of which the first is the better one."""

    prompt: Prompt
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt to be answered, and all that the reward function may look at."""

    prompt: Prompt
    fields: Mapping[str, Any]


def parse_sft(value: Any) -> ChatRow | PromptCompletionRow:
    """A row to learn from: a conversation in any layout, or a prompt and its completion."""
    row = layouts.check_mapping(value, _SFT_LAYOUT)
    name = layouts.find_message_list_field(row)
    if name is not None:
        return _require_assistant(_messages(name, row[name], _CHAT_LAYOUT))
    if (
        "prompt" not in row
        and (turns := layouts.to_prompt_response_messages(row, _SFT_LAYOUT)) is not None
    ):
        return _require_assistant(_messages("row", turns, _SFT_LAYOUT))
    prompt, completion = (
        layouts.get_text_field(row, name, _SFT_LAYOUT) for name in ("prompt", "completion")
    )
    if not completion:
        raise InvalidInput("completion is empty, so there is nothing to learn")
    return PromptCompletionRow(prompt, completion)


def _require_assistant(messages: Messages) -> ChatRow:
    if not any(message["role"] == "assistant" for message in messages):
        raise InvalidInput("no message has the role 'assistant', so there is nothing to learn")
    return ChatRow(messages)


def parse_preference(value: Any) -> PreferenceRow:
    """A row with two answers to compare."""
    row = layouts.check_mapping(value, _PAIR_LAYOUT)
    names = layouts.find_preference_fields(row) or layouts.PREFERENCE_FIELDS[0]
    if "prompt" not in row and all(isinstance(row.get(name), list) for name in names):
        return _split_pair(row, names)
    prompt = _prompt(row, _PAIR_LAYOUT)
    chosen, rejected = (_answer(row, name) for name in names)
    return _require_different(PreferenceRow(prompt, chosen, rejected), names)


def _split_pair(row: Mapping[str, Any], names: tuple[str, str]) -> PreferenceRow:
    """Two whole conversations, which may differ only in their last message."""
    chosen, rejected = (_messages(name, row[name], _PAIR_LAYOUT) for name in names)
    if not chosen[:-1] or chosen[:-1] != rejected[:-1]:
        raise InvalidInput(
            f"{names[0]} and {names[1]} must be the same conversation up to their last message"
        )
    last = {name: [found[-1]] for name, found in zip(names, (chosen, rejected), strict=True)}
    answers = [_answer(last, name) for name in names]
    return _require_different(PreferenceRow(chosen[:-1], *answers), names)


def _require_different(row: PreferenceRow, names: tuple[str, str]) -> PreferenceRow:
    if row.chosen == row.rejected:
        raise InvalidInput(f"{names[0]} and {names[1]} are the same: {truncated_repr(row.chosen)}")
    return row


def parse_prompt(value: Any) -> PromptRow:
    """A row to be answered and rewarded."""
    row = layouts.check_mapping(value, _PROMPT_LAYOUT)
    return PromptRow(_prompt(row, _PROMPT_LAYOUT), row)


def _prompt(row: Mapping[str, Any], expected: str) -> Prompt:
    if isinstance(row.get("prompt"), list):
        return _messages("prompt", row["prompt"], expected)
    prompt = layouts.get_text_field(row, "prompt", expected)
    if not prompt:
        raise InvalidInput("prompt is empty; expected text or messages")
    return prompt


def _answer(row: Mapping[str, Any], name: str) -> str:
    """An answer as text; a list of one assistant message is taken too, as many data sets have."""
    given = row.get(name)
    if isinstance(given, list) and len(given) == 1:
        given = _messages(name, given, _PAIR_LAYOUT)[0].get("content")
    if name in row and not isinstance(given, str):
        raise InvalidInput(f"{name} is {truncated_repr(row[name])}; expected text")
    answer = given if isinstance(given, str) else layouts.get_text_field(row, name, _PAIR_LAYOUT)
    if not answer:
        raise InvalidInput(f"{name} is empty; expected an answer")
    return answer


def _messages(name: str, given: Any, expected: str) -> Messages:
    if not isinstance(given, list) or not given:
        raise InvalidInput(f"{name} is {truncated_repr(given)}; expected {expected}")
    return tuple(_message(f"{name}[{index}]", message) for index, message in enumerate(given))


def _message(where: str, given: Any) -> Mapping[str, Any]:
    """A message with role and content; further fields are kept for the chat template."""
    if not isinstance(given, dict):
        raise InvalidInput(f"{where} is {truncated_repr(given)}; expected a role and a content")
    message = _normalize_message(given)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidInput(f"{where} has no role such as 'user' or 'assistant'")
    has_calls = content is None and bool(message.get("tool_calls"))
    if not has_calls and not isinstance(content, str | list):
        raise InvalidInput(f"{where} has the content {truncated_repr(content)}; expected text")
    return message


def _normalize_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message of ShareGPT ("from", "value") as one with role and content."""
    is_own = "role" in message
    role = message.get("role" if is_own else "from")
    if isinstance(role, str):
        # A template may know a role "developer" or "function" of its own.
        role = (layouts.ROLE_ALIASES if is_own else layouts.SHAREGPT_ROLES).get(role, role)
    if is_own and role == message["role"] and "value" not in message:
        return message
    content = message.get("content", message.get("value"))
    rest = {name: message[name] for name in message if name not in {"from", "value"}}
    return rest | {"role": role, "content": content}
