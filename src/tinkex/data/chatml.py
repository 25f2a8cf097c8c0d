"""Render conversations as ChatML spans, marked as training targets or not.

`CHAT_TEMPLATE` is the equivalent Jinja template for the trained model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

Message: TypeAlias = Mapping[str, object]

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
#: Delimiters of conversations; message contents must not contain them.
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
#: Tags that are single tokens but stay visible in decoded text.
TAG_TOKENS = (
    *("<think>", "</think>", "<answer>", "</answer>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"),
)
ROLES = ("system", "user", "assistant", "tool")
_TOOLS_PROMPT = (
    "You may call these functions:\n<tools>\n{}\n</tools>\n"
    'A call is <tool_call>{{"name": ..., "arguments": ...}}</tool_call>.'
)

CHAT_TEMPLATE = """\
{%- set first = 0 -%}
{%- if tools | default(none) -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}
{%- set first = 1 -%}
{{- messages[0].content + '\\n\\n' -}}
{%- endif -%}
{{- 'You may call these functions:\\n<tools>\\n' -}}
{%- for tool in tools -%}
{{- tool | tojson -}}{{- '\\n' -}}
{%- endfor -%}
{{- '</tools>\\nA call is <tool_call>{"name": ..., "arguments": ...}</tool_call>.' -}}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[first:] -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'tool' -%}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- else -%}
{%- if message.reasoning_content | default(none) -%}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls | default(none) or [] -%}
{{- '<tool_call>' + ((call.function | default(none) or call) | tojson) + '</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""


class ChatSpan(NamedTuple):
    """A part of a conversation's text."""

    text: str
    is_learned: bool
    """True for assistant content, including its end-of-turn token."""


def render_spans(messages: Sequence[Message], tools: Sequence[object] = ()) -> list[ChatSpan]:
    """Return the spans of a conversation; concatenated, they equal the template's output."""
    return list(_merge_spans(_iter_spans(messages, tools)))


def render_prompt(messages: Sequence[Message]) -> str:
    """Render a conversation up to the start of the assistant's reply."""
    text = "".join(span.text for span in _iter_spans(messages, ()))
    return f"{text}{IM_START}assistant\n"


def _iter_spans(messages: Sequence[Message], tools: Sequence[object]) -> Iterator[ChatSpan]:
    rest = list(messages)
    if tools:
        prompt = _TOOLS_PROMPT.format("\n".join(_json(tool) for tool in tools))
        if rest[0]["role"] == "system":
            prompt = f"{rest.pop(0)['content']}\n\n{prompt}"
        yield ChatSpan(f"{IM_START}system\n{prompt}{IM_END}\n", False)
    for message in rest:
        is_learned = message["role"] == "assistant"
        yield ChatSpan(f"{IM_START}{message['role']}\n", False)
        yield ChatSpan(f"{_content(message)}{IM_END}", is_learned)
        yield ChatSpan("\n", False)


def _content(message: Message) -> str:
    text = message.get("content") or ""
    if message["role"] == "tool":
        return f"<tool_response>\n{text}\n</tool_response>"
    if reasoning := message.get("reasoning_content"):
        text = f"<think>\n{reasoning}\n</think>\n\n{text}"
    calls = message.get("tool_calls")
    return f"{text}{''.join(map(_tool_call, calls)) if isinstance(calls, list) else ''}"


def _tool_call(call: Mapping[str, object]) -> str:
    return f"<tool_call>{_json(call.get('function') or call)}</tool_call>"


def _merge_spans(spans: Iterator[ChatSpan]) -> Iterator[ChatSpan]:
    """Merge adjacent spans that are not targets, so that text is split only at targets."""
    text = ""
    for span in spans:
        if not span.is_learned:
            text += span.text
            continue
        if text:
            yield ChatSpan(text, False)
            text = ""
        yield span
    if text:
        yield ChatSpan(text, False)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
