"""Requests of Anthropic's Messages API as requests of a chat."""

from __future__ import annotations

import json

import msgspec
import pytest

from tinkex.errors import InvalidInput
from tinkex.server.inference.anthropic_messages import omits_thinking, to_chat_request
from tinkex.server.inference.anthropic_request import CountTokensRequest, MessagesRequest
from tinkex.server.inference.chat_request import ChatRequest, SamplingSettings

USER = {"role": "user", "content": "hello"}
WEATHER = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}


def decode(**fields: object) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 8, "messages": [USER]} | fields
    return msgspec.json.decode(json.dumps(body), type=MessagesRequest)


def convert(**fields: object) -> ChatRequest:
    return to_chat_request(decode(**fields))


def messages_of(*messages: object) -> list[object]:
    return list(convert(messages=list(messages)).messages)


def test_a_plain_request() -> None:
    request = convert(system="be brief", unknown_field=1)
    assert request == ChatRequest(
        model="m",
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
        ],
        tools=[],
        sampling=SamplingSettings(max_tokens=8),
    )


def test_null_is_the_same_as_a_missing_field() -> None:
    names = ("system", "tools", "tool_choice", "thinking", "temperature", "top_p", "top_k")
    others = ("stop_sequences", "stream", "metadata", "output_config", "container", "mcp_servers")
    assert convert(**dict.fromkeys((*names, *others))) == convert()


def test_sampling_settings() -> None:
    request = convert(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        seed=3,
        stop_sequences=["\n\nHuman:", "END"],
        metadata={"user_id": "u" * 300},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"a": 1}}},
        cache_control={"type": "ephemeral"},
        service_tier="auto",
    )
    assert request.sampling == SamplingSettings(
        max_tokens=8,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        seed=3,
        stop=("\n\nHuman:", "END"),
        grammar={"a": 1},
    )
    assert request.user == "u" * 256
    assert request.template_variables == {"reasoning_effort": "high"}


def test_counting_needs_no_limit() -> None:
    body = json.dumps({"model": "m", "messages": [USER], "thinking": {"type": "adaptive"}})
    request = to_chat_request(msgspec.json.decode(body, type=CountTokensRequest))
    assert request.sampling.max_tokens is None
    assert request.template_variables == {"enable_thinking": True}
    with pytest.raises(msgspec.ValidationError, match="max_tokens"):
        msgspec.json.decode(body, type=MessagesRequest)


@pytest.mark.parametrize("value", [0, -1, None])
def test_top_k_without_a_limit(value: int | None) -> None:
    assert convert(top_k=value).sampling.top_k == -1


@pytest.mark.parametrize(
    ("thinking", "is_enabled"),
    [
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 7}, True),
        ({"type": "adaptive"}, True),
    ],
)
def test_thinking_is_a_variable_of_the_template(
    thinking: dict[str, object], is_enabled: bool
) -> None:
    assert convert(thinking=thinking).template_variables == {"enable_thinking": is_enabled}


def test_reasoning_may_be_omitted() -> None:
    assert omits_thinking(decode(thinking={"type": "adaptive", "display": "omitted"}))
    assert not omits_thinking(decode(thinking={"type": "adaptive"}))
    assert not omits_thinking(decode())


def test_texts_of_a_turn_are_lines_and_consecutive_turns_are_joined() -> None:
    text = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    other = {"type": "text", "text": "b"}
    assert messages_of({"role": "user", "content": [text, other]}, USER) == [
        {"role": "user", "content": "a\nb\nhello"}
    ]
    assert convert(system=[text, other]).messages[0] == {"role": "system", "content": "a\nb"}


def test_texts_of_an_answer_stay_as_they_were_generated() -> None:
    answer = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert messages_of(USER, {"role": "assistant", "content": answer}, USER)[1] == {
        "role": "assistant",
        "content": "a b",
    }


def test_a_system_message_stays_in_its_place() -> None:
    system = {"role": "system", "content": "now in French"}
    assert messages_of(USER, system, USER)[1] == system


def test_a_loop_with_tools() -> None:
    calls = [
        {"type": "thinking", "thinking": "hm", "signature": "whatever"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
    ]
    results = [
        {"type": "text", "text": "and now?"},
        {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": "t2",
            "is_error": True,
            "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "clock"}],
        },
        {"type": "tool_result", "tool_use_id": "t3"},
    ]
    assert messages_of(
        USER, {"role": "assistant", "content": calls}, {"role": "user", "content": results}
    ) == [
        USER,
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Paris"}},
                },
                {"id": "t2", "type": "function", "function": {"name": "time", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny", "name": "weather"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no\nclock", "name": "time"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "and now?"},
    ]


def test_a_last_assistant_message_is_continued() -> None:
    request = convert(messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert request.messages[-1] == {"role": "assistant", "content": "The answer is ("}
    assert request.continues_final_message
    assert not request.has_generation_prompt


def test_an_empty_last_assistant_message_is_left_out() -> None:
    request = convert(messages=[USER, {"role": "assistant", "content": []}])
    assert request.messages == [USER]
    assert request.has_generation_prompt
    assert not request.continues_final_message


def test_tools_have_the_form_of_openai() -> None:
    request = convert(tools=[WEATHER | {"type": "custom", "strict": True}])
    function = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
    assert request.tools == [{"type": "function", "function": function}]
    assert (request.tool_choice, request.forced_tool) == ("auto", None)
    assert request.has_parallel_tool_calls


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "none"}, ("none", None, True)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "tool", "name": "weather"}, ("required", "weather", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
    ],
)
def test_tool_choice(choice: dict[str, object], expected: tuple[object, ...]) -> None:
    request = convert(tools=[WEATHER], tool_choice=choice)
    found = (request.tool_choice, request.forced_tool, request.has_parallel_tool_calls)
    assert found == expected


def test_neutral_values_of_other_features_are_accepted() -> None:
    keep_all = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    request = convert(context_management=keep_all, mcp_servers=[], container=None)
    assert request == convert()


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: 1 to 4096"),
        ({"messages": [USER] * 4097}, "got 4097"),
        ({"messages": [{"role": "tool", "content": ""}]}, r"messages.0.role: .*got 'tool'"),
        (
            {"messages": [USER, {"role": "user", "content": [IMAGE]}]},
            r"messages.1.content.0.type: 'image' blocks are not supported",
        ),
        ({"system": [IMAGE]}, "system.0.type: 'image'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages.0.content.0.tool_use_id",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
                        ],
                    }
                ]
            },
            "messages.0.content.0.content.0.type: 'image'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
            "messages.0.content.0: a tool_use needs id, name and input",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                    }
                ]
            },
            "tool_use blocks without results",
        ),
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"temperature": 1.5}, "temperature: must be between 0 and 1, got 1.5"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p: must be greater than 0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k: must be between 1 and 2147483647, or 0 for no limit"),
        ({"seed": 2**63}, "seed: must be between"),
        ({"seed": -(2**63)}, "seed: must be between"),
        ({"stop_sequences": ["x"] * 17}, "at most 16"),
        ({"stop_sequences": ["x", ""]}, "stop_sequences.1"),
        ({"tools": [{"name": "f"}]}, "tools.0: a tool needs name and input_schema"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools.0.type: this server does not have the tool 'web_search_20250305'",
        ),
        ({"tools": [WEATHER] * 1025}, "at most 1024"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type: must be one of auto, any, tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: 'any' needs tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice.name: 'x' is not one of the tools",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 8}}, "less than max_tokens"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: this server does not support it"),
        ({"container": "c"}, "container"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        convert(**fields)
