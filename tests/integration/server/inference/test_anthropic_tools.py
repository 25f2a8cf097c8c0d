"""Tools, thinking and prefill of Anthropic's API through Anthropic's SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.integration.server.inference.conftest import KEY, TIMEOUT_SECONDS
from tinkex.testing import SCRIPTED, StubServer, say, scripted_model

TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    with (
        StubServer(api_keys=[KEY], models=[scripted_model()]) as server,
        anthropic.Anthropic(
            base_url=server.url, api_key=KEY, max_retries=0, timeout=TIMEOUT_SECONDS
        ) as opened,
    ):
        yield opened


def question(answer: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Hello! {say(answer)}"}]
    return {"model": SCRIPTED, "max_tokens": 200, "messages": messages} | fields


def ask_twice(client: anthropic.Anthropic, request: dict[str, Any]) -> anthropic.types.Message:
    """Return an answer that is the same whether it is streamed or not."""
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        streamed = stream.get_final_message()
    assert contents_of(streamed) == contents_of(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage == whole.usage
    return whole


def contents_of(message: Any) -> list[dict[str, Any]]:
    """The blocks of a message, without ids, which differ between requests."""
    blocks = [block.to_dict() for block in message.content]
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


def test_a_loop_with_tools(client: anthropic.Anthropic) -> None:
    request = question(f"Let me look.{CALL}{CALL.replace('Paris', 'Rome')}", tools=[TOOL])
    message = ask_twice(client, request)
    assert message.stop_reason == "tool_use"
    text, first, second = contents_of(message)
    assert text == {"type": "text", "text": "Let me look."}
    assert first == {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}
    assert second["input"] == {"city": "Rome"}
    ids = [block.id for block in message.content if block.type == "tool_use"]
    assert len(set(ids)) == 2
    assert all(each.startswith("toolu_") and len(each) == 30 for each in ids)

    results = [
        {"type": "tool_result", "tool_use_id": each, "content": f"sunny {say('It is sunny.')}"}
        for each in ids
    ]
    request["messages"] = [
        *request["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    final = ask_twice(client, request)
    assert (contents_of(final), final.stop_reason) == (
        [{"type": "text", "text": "It is sunny."}],
        "end_turn",
    )


def test_tools_that_are_not_offered_are_text(client: anthropic.Anthropic) -> None:
    for choice in (None, {"type": "none"}):
        fields = {"tools": [TOOL], "tool_choice": choice} if choice else {}
        message = ask_twice(client, question(CALL, **fields))
        assert message.stop_reason == "end_turn"
        assert [block["type"] for block in contents_of(message)] == ["text"]


def test_one_tool_at_a_time(client: anthropic.Anthropic) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask_twice(client, question(CALL + CALL, tools=[TOOL], tool_choice=choice))
    assert [block["type"] for block in contents_of(message)] == ["tool_use"]
    assert message.stop_reason == "tool_use"


def test_a_forced_tool(client: anthropic.Anthropic) -> None:
    choice = {"type": "tool", "name": "weather"}
    answer = '{"city": "Paris"}}</tool_call>'
    message = ask_twice(client, question(answer, tools=[TOOL], tool_choice=choice))
    assert contents_of(message) == [
        {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}
    ]
    assert message.stop_reason == "tool_use"


def test_a_call_that_is_cut_off(client: anthropic.Anthropic) -> None:
    request = question(CALL, tools=[TOOL])
    num_tokens = client.messages.create(**request).usage.output_tokens
    message = client.messages.create(**request | {"max_tokens": num_tokens - 12})
    assert message.stop_reason == "max_tokens"
    for block in message.content:
        if block.type == "tool_use":
            assert list(block.input) == ["INVALID_JSON"]


def test_thinking(client: anthropic.Anthropic) -> None:
    thinking = {"type": "enabled", "budget_tokens": 100}
    request = question("<think>One and one.</think>Two.", thinking=thinking)
    message = ask_twice(client, request)
    assert contents_of(message) == [
        {"type": "thinking", "thinking": "One and one.", "signature": "unsigned"},
        {"type": "text", "text": "Two."},
    ]
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens

    more = [*request["messages"], {"role": "assistant", "content": message.content}]
    follow_up = {"role": "user", "content": say("Yes.")}
    answer = ask_twice(client, request | {"messages": [*more, follow_up]})
    assert contents_of(answer) == [{"type": "text", "text": "Yes."}]


def test_thinking_that_is_not_shown(client: anthropic.Anthropic) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    message = ask_twice(client, question("<think>Hm.</think>Two.", thinking=thinking))
    assert contents_of(message) == [
        {"type": "thinking", "thinking": "", "signature": "unsigned"},
        {"type": "text", "text": "Two."},
    ]


def test_disabled_thinking_is_part_of_the_prompt(client: anthropic.Anthropic) -> None:
    request = question("Two.")
    disabled = request | {"thinking": {"type": "disabled"}}
    usages = [client.messages.create(**each).usage.input_tokens for each in (request, disabled)]
    assert usages[1] > usages[0], "the template closes the reasoning itself"
    assert contents_of(ask_twice(client, disabled)) == [{"type": "text", "text": "Two."}]


def test_prefill(client: anthropic.Anthropic) -> None:
    request = question("42.")
    request["messages"].append({"role": "assistant", "content": "The answer is "})
    message = ask_twice(client, request)
    assert contents_of(message) == [{"type": "text", "text": "42."}]
    whole = question("42.")
    counts = [
        client.messages.count_tokens(model=SCRIPTED, messages=each["messages"]).input_tokens
        for each in (whole, request)
    ]
    assert counts[1] > counts[0]
