"""Rows of training data, parsed from JSON.

Fine-tuning recipes (`parse_sft`, `parse_preference`, `parse_prompt`) render conversations with the
model's own chat template, so they accept any role and keep extra message fields. Pipeline stages
(`STAGE_PARSERS`) render ChatML, and accept more layouts but only its roles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tinkex.data.jsonl import truncated_repr
from tinkex.data.layouts import (
    MESSAGE_LIST_FIELDS,
    PREFERENCE_FIELDS,
    Messages,
    check_mapping,
    check_no_special_tokens,
    find_conversation,
    find_preference_fields,
    format_field_names,
    get_text_field,
    parse_chatml_message,
    parse_messages,
    parse_template_message,
    parse_tools,
    require_assistant,
)
from tinkex.errors import InvalidInput

#: Plain text, or a conversation for the model to continue.
Prompt: TypeAlias = str | Messages

_SFT_LAYOUT = (
    '{"messages": [{"role": ..., "content": ...}, ...]}, "conversations", '
    '"instruction"/"output", "question"/"answer" or {"prompt": text, "completion": text}'
)
_PREFERENCE_LAYOUT = '{"prompt": text or messages, "chosen": text, "rejected": text}'
_PROMPT_LAYOUT = '{"prompt": text or messages, ...}'
_TEXT_LAYOUT = '{"text": ...} or {"ids": [...]}'
_CONVERSATION_LAYOUT = (
    '{"conversations": [{"role": ..., "content": ...}, ...]}, "messages", '
    '"instruction"/"output", "question"/"answer" or "prompt"/"completion"'
)
_PAIR_LAYOUT = (
    '{"chosen": messages, "rejected": messages}, or "prompt" with "chosen" and "rejected" '
    'or "preferred" and "other"'
)


@dataclass(frozen=True, slots=True)
class TextRow:
    """Plain text for pretraining, or its token ids."""

    text: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation; the assistant's messages are the training targets."""

    messages: Messages
    tools: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatPairRow:
    """Two conversations, the first of which is preferred."""

    chosen: ChatRow
    rejected: ChatRow


@dataclass(frozen=True, slots=True)
class PromptCompletionRow:
    """A text prompt and its completion; the completion is the training target."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """Two answers to one prompt, the first of which is preferred."""

    prompt: Prompt
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt to sample from, and the row's fields for the reward function."""

    prompt: Prompt
    fields: Mapping[str, object]


#: A row of a fine-tuning recipe.
RecipeRow: TypeAlias = ChatRow | PromptCompletionRow | PreferenceRow | PromptRow
#: A row of a pipeline stage.
StageRow: TypeAlias = TextRow | ChatRow | ChatPairRow


# --- fine-tuning recipes --------------------------------------------------------------------


def parse_sft(value: object) -> ChatRow | PromptCompletionRow:
    """Parse a conversation in any layout, or a prompt and its completion."""
    row = check_mapping(value, _SFT_LAYOUT)
    # A prompt beside a completion is plain text here, not a conversation of two messages.
    if "prompt" not in row or any(name in row for name in MESSAGE_LIST_FIELDS):
        messages = find_conversation(row, _SFT_LAYOUT, parse_template_message)
        if messages is not None:
            return ChatRow(require_assistant(messages))
    prompt, completion = (
        get_text_field(row, name, _SFT_LAYOUT) for name in ("prompt", "completion")
    )
    if not completion:
        raise InvalidInput("completion is empty, so there is nothing to learn")
    return PromptCompletionRow(prompt, completion)


def parse_preference(value: object) -> PreferenceRow:
    """Parse a prompt with two answers, or two conversations that differ in the last message."""
    row = check_mapping(value, _PREFERENCE_LAYOUT)
    names = find_preference_fields(row) or PREFERENCE_FIELDS[0]
    if "prompt" not in row and all(isinstance(row.get(name), list) for name in names):
        prompt, answers = _split_conversations(row, names)
    else:
        prompt = _parse_prompt_field(row, _PREFERENCE_LAYOUT)
        answers = [_parse_answer(row, name) for name in names]
    if answers[0] == answers[1]:
        raise InvalidInput(f"{names[0]} and {names[1]} are the same: {truncated_repr(answers[0])}")
    return PreferenceRow(prompt, *answers)


def parse_prompt(value: object) -> PromptRow:
    """Parse a prompt to sample from; all fields of the row are passed to the reward function."""
    row = check_mapping(value, _PROMPT_LAYOUT)
    return PromptRow(_parse_prompt_field(row, _PROMPT_LAYOUT), row)


def _split_conversations(
    row: Mapping[str, object], names: tuple[str, str]
) -> tuple[Prompt, list[str]]:
    """Split two conversations into their common messages and the two last answers."""
    chosen, rejected = (parse_messages(name, row[name], parse_template_message) for name in names)
    if not chosen[:-1] or chosen[:-1] != rejected[:-1]:
        raise InvalidInput(
            f"{names[0]} and {names[1]} must be the same conversation up to their last message"
        )
    last = {names[0]: [chosen[-1]], names[1]: [rejected[-1]]}
    return chosen[:-1], [_parse_answer(last, name) for name in names]


def _parse_prompt_field(row: Mapping[str, object], expected: str) -> Prompt:
    if isinstance(row.get("prompt"), list):
        return parse_messages("prompt", row["prompt"], parse_template_message)
    prompt = get_text_field(row, "prompt", expected)
    if not prompt:
        raise InvalidInput("prompt is empty; expected text or messages")
    return prompt


def _parse_answer(row: Mapping[str, object], name: str) -> str:
    """Return an answer as text; many data sets wrap it in a list of one assistant message."""
    value = row.get(name)
    if isinstance(value, list) and len(value) == 1:
        value = parse_messages(name, value, parse_template_message)[0].get("content")
    if name in row and not isinstance(value, str):
        raise InvalidInput(f"{name} is {truncated_repr(row[name])}; expected text")
    answer = value if isinstance(value, str) else get_text_field(row, name, _PREFERENCE_LAYOUT)
    if not answer:
        raise InvalidInput(f"{name} is empty; expected an answer")
    return answer


# --- pipeline stages ------------------------------------------------------------------------


def parse_text_row(value: object) -> TextRow:
    """Parse a row of plain text or token ids."""
    row = check_mapping(value, _TEXT_LAYOUT)
    ids = row.get("ids")
    if ids is not None:
        if not isinstance(ids, list) or not ids or not all(_is_token_id(token) for token in ids):
            raise InvalidInput(f"ids is {truncated_repr(ids)}; expected a list of tokens")
        return TextRow("", tuple(ids))
    text = get_text_field(row, "text", _TEXT_LAYOUT)
    if not text.strip():
        raise InvalidInput("text is empty; expected something to learn from")
    return TextRow(check_no_special_tokens("text", text))


def parse_chat_row(value: object) -> ChatRow:
    """Parse a conversation in any layout."""
    row = check_mapping(value, _CONVERSATION_LAYOUT)
    messages = find_conversation(row, _CONVERSATION_LAYOUT, parse_chatml_message)
    if messages is None:
        raise InvalidInput(f"found {_describe_fields(row)}; expected {_CONVERSATION_LAYOUT}")
    require_assistant(messages)
    return ChatRow(messages, parse_tools(row, messages))


def parse_chat_pair_row(value: object) -> ChatPairRow:
    """Parse a preferred and a rejected conversation, or a prompt with two answers."""
    row = check_mapping(value, _PAIR_LAYOUT)
    names = find_preference_fields(row)
    if names is None:
        raise InvalidInput(f"found {_describe_fields(row)}; expected {_PAIR_LAYOUT}")
    prompt = _parse_prompt_messages(row.get("prompt"))
    chosen, rejected = (_append_answer(prompt, name, row[name]) for name in names)
    if chosen == rejected:
        raise InvalidInput(f"{names[0]} and {names[1]} are the same, so nothing is preferred")
    for name, messages in zip(names, (chosen, rejected), strict=True):
        if messages[-1]["role"] != "assistant":
            raise InvalidInput(f"{name} does not end with a message of the assistant")
    tools = parse_tools(row, chosen)
    return ChatPairRow(ChatRow(chosen, tools), ChatRow(rejected, tools))


def parse_any_row(value: object) -> StageRow:
    """Parse a row of any stage; the tokenizer is trained on all of them."""
    expected = f"{_TEXT_LAYOUT}, {_CONVERSATION_LAYOUT}, or {_PAIR_LAYOUT}"
    row = check_mapping(value, expected)
    if "text" in row or "ids" in row:
        return parse_text_row(row)
    if any(name in row for name in ("chosen", "preferred")):
        return parse_chat_pair_row(row)
    return parse_chat_row(row)


#: The row parser of each pipeline stage.
STAGE_PARSERS: Mapping[str, Callable[[object], StageRow]] = {
    "pretrain": parse_text_row,
    "sft": parse_chat_row,
    "dpo": parse_chat_pair_row,
    "r1": parse_chat_row,
}


def _parse_prompt_messages(prompt: object) -> Messages:
    if prompt is None or prompt == "":
        return ()
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return parse_messages("prompt", prompt, parse_chatml_message)


def _append_answer(prompt: Messages, name: str, answer: object) -> Messages:
    if isinstance(answer, str):
        if not prompt:
            raise InvalidInput(f"{name} is text, but the row has no prompt")
        answer = [{"role": "assistant", "content": answer}]
    return (*prompt, *parse_messages(name, answer, parse_chatml_message))


def _is_token_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and token >= 0


def _describe_fields(row: Mapping[str, object]) -> str:
    return f"the fields {format_field_names(row)}" if row else "no fields"
