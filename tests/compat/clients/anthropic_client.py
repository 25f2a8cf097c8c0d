"""The official client of the Anthropic API: messages, streams, tools, reasoning, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic

from tests.compat.clients.conversations import (
    ANSWER,
    BOTH,
    BOTH_CALLS,
    CALL,
    COUNT,
    FORCED,
    FORCED_ARGUMENTS,
    LONG,
    PLAIN,
    PLAIN_ANSWER,
    QUESTION,
    RESULT,
    SUM,
    SUM_ANSWER,
    SUM_REASONING,
)
from tests.compat.clients.registry import Place, scenario

TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def client_of(place: Place, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": place.url, "api_key": place.key, **options})


def asked(place: Place, text: str = PLAIN, **options: Any) -> dict[str, Any]:
    """The arguments of a request."""
    # The SDK has no argument for the temperature any more; the API has.
    greedy = {"max_tokens": 80, "extra_body": {"temperature": 0.0}}
    messages = [{"role": "user", "content": place.prompt(text)}]
    return {"model": place.base_model, "messages": messages, **greedy, **options}


def refusal(call: Callable[[], Any], kind: type[anthropic.APIStatusError]) -> Any:
    """The error that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("the call was accepted")


@scenario("`messages.create`")
def create(place: Place) -> None:
    answer = client_of(place).messages.create(**asked(place))
    [block] = answer.content
    assert (block.type, block.text) == ("text", PLAIN_ANSWER), answer
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn")
    assert answer.model == place.base_model and answer.usage.output_tokens > 0, answer
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 0, answer
    assert answer._request_id, answer


@scenario("both base URLs, `api_key` and `auth_token`")
def base_urls(place: Place) -> None:
    for path in ("", "/anthropic/api"):
        for name in ("api_key", "auth_token"):
            key = {"api_key": None} | {name: place.key}
            client = client_of(place, base_url=place.url + path, **key)
            answer = client.messages.create(**asked(place))
            assert answer.content[0].text == PLAIN_ANSWER, (path, name, answer)
    header = {"x-api-key": place.key, "authorization": anthropic.omit}
    client = client_of(place, default_headers=header)
    assert client.messages.create(**asked(place)).content[0].text == PLAIN_ANSWER


@scenario("the stream helper: order of events, final message")
def stream(place: Place) -> None:
    whole = client_of(place).messages.create(**asked(place))
    with client_of(place).messages.stream(**asked(place)) as events:
        kinds = [each.type for each in events]
        final = events.get_final_message()
    for first, then in (
        ("message_start", "content_block_start"),
        ("content_block_start", "content_block_delta"),
        ("content_block_delta", "content_block_stop"),
        ("content_block_stop", "message_delta"),
        ("message_delta", "message_stop"),
    ):
        assert kinds.index(first) < kinds.index(then), kinds
    assert [each.text for each in final.content] == [PLAIN_ANSWER], (final, whole)
    assert final.stop_reason == "end_turn", final
    assert final.usage.output_tokens == whole.usage.output_tokens, (final, whole)
    with client_of(place).messages.stream(**asked(place)) as events:
        assert "".join(events.text_stream) == PLAIN_ANSWER


@scenario("`stream=True` without the helper")
def raw_stream(place: Place) -> None:
    events = list(client_of(place).messages.create(**asked(place, stream=True)))
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"], events
    assert events[0].message.content == [] and events[0].message.stop_reason is None, events[0]


@scenario("async client")
def async_client(place: Place) -> None:
    async def run() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=place.url, api_key=place.key) as client:

            async def one() -> str:
                async with client.messages.stream(**asked(place)) as events:
                    return await events.get_final_text()

            return await asyncio.gather(*(one() for _ in range(8)))

    assert set(asyncio.run(run())) == {PLAIN_ANSWER}


@scenario("`stop_sequences`, `max_tokens`, `stop_reason`")
def limits(place: Place) -> None:
    client = client_of(place)
    cut = client.messages.create(**asked(place, COUNT, stop_sequences=["5", "9"]))
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "5"), cut
    assert "4" in cut.content[0].text and "5" not in cut.content[0].text, cut
    short = client.messages.create(**asked(place, COUNT, max_tokens=1))
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 1), short
    with client.messages.stream(**asked(place, COUNT, stop_sequences=["5"])) as events:
        final = events.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "5"), final


@scenario("`system` as text and as blocks, prefill")
def system(place: Place) -> None:
    client = client_of(place)
    for told in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        assert client.messages.create(**asked(place, system=told)).content, told
    arguments = asked(place, COUNT)
    arguments["messages"].append({"role": "assistant", "content": "3,"})
    assert client.messages.create(**arguments).stop_reason in {"end_turn", "max_tokens"}


@scenario("a loop with tools")
def tools(place: Place) -> None:
    client = client_of(place)
    arguments = asked(place, QUESTION, model=place.agent, tools=[TOOL])
    first = client.messages.create(**arguments)
    [call] = [each for each in first.content if each.type == "tool_use"]
    assert (call.name, call.input) == (CALL["name"], CALL["arguments"]), first
    assert first.stop_reason == "tool_use" and call.id.startswith("toolu_"), first
    result = {"type": "tool_result", "tool_use_id": call.id, "content": place.prompt(RESULT)}
    arguments["messages"] += [first.to_param(), {"role": "user", "content": [result]}]
    last = client.messages.create(**arguments)
    assert [each.text for each in last.content] == [ANSWER], last
    assert last.stop_reason == "end_turn", last


@scenario("streamed and parallel tool calls")
def tool_stream(place: Place) -> None:
    arguments = asked(place, BOTH, model=place.agent, tools=[TOOL])
    with client_of(place).messages.stream(**arguments) as events:
        indexes = [each.index for each in events if each.type == "content_block_start"]
        final = events.get_final_message()
    calls = [each for each in final.content if each.type == "tool_use"]
    found = [{"name": each.name, "arguments": each.input} for each in calls]
    assert found == [*BOTH_CALLS] and final.stop_reason == "tool_use", final
    assert indexes == list(range(len(final.content))), (indexes, final)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    one = client_of(place).messages.create(**arguments, tool_choice=choice)
    assert len([each for each in one.content if each.type == "tool_use"]) == 1, one


@scenario("`tool_choice`: none, any, a tool")
def tool_choice(place: Place) -> None:
    client = client_of(place)
    arguments = asked(place, QUESTION, model=place.agent, tools=[TOOL])
    none = client.messages.create(**arguments, tool_choice={"type": "none"})
    assert not [each for each in none.content if each.type == "tool_use"], none
    named = {"type": "tool", "name": "get_weather"}
    for choice, said in (({"type": "any"}, FORCED), (named, FORCED_ARGUMENTS)):
        arguments["messages"][0]["content"] = place.prompt(QUESTION, said)
        forced = client.messages.create(**arguments, tool_choice=choice)
        calls = [each.name for each in forced.content if each.type == "tool_use"]
        assert calls == ["get_weather"], forced


@scenario("reasoning as thinking blocks, which are sent back")
def thinking(place: Place) -> None:
    client = client_of(place)
    arguments = asked(place, SUM, model=place.agent)
    answer = client.messages.create(**arguments)
    assert [each.type for each in answer.content] == ["thinking", "text"], answer
    assert answer.content[0].thinking.strip() == SUM_REASONING, answer
    assert answer.content[1].text == SUM_ANSWER, answer
    with client.messages.stream(**arguments) as events:
        final = events.get_final_message()
    assert [each.type for each in final.content] == ["thinking", "text"], final
    assert final.content[0].thinking == answer.content[0].thinking, (final, answer)
    assert final.content[1].text == SUM_ANSWER, final
    arguments["messages"] += [answer.to_param(), {"role": "user", "content": place.prompt(PLAIN)}]
    assert client.messages.create(**arguments).content


@scenario("`messages.count_tokens`")
def count_tokens(place: Place) -> None:
    arguments = asked(place, tools=[TOOL], system="Be brief.")
    answer = client_of(place).messages.create(**arguments)
    del arguments["max_tokens"]
    counted = client_of(place).messages.count_tokens(**arguments).input_tokens
    usage = answer.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0), (counted, usage)


@scenario("`models.list`, `models.retrieve`")
def models(place: Place) -> None:
    client = client_of(place)
    listed = {each.id: each for each in client.models.list(limit=1)}
    assert place.base_model in listed and place.agent in listed, listed
    for name in (place.base_model, place.agent):
        found = client.models.retrieve(name)
        assert (found.id, found.type, found.lifecycle) == (name, "model", "active"), found
        assert found.created_at.tzinfo and found.display_name, found


@scenario("error classes")
def errors(place: Place) -> None:
    client = client_of(place, max_retries=0)
    create = client.messages.create
    wrong = client.with_options(api_key="tml-wrong").messages.create
    error = refusal(lambda: wrong(**asked(place)), anthropic.AuthenticationError)
    assert error.body["error"]["type"] == "authentication_error", error.body
    missing = refusal(lambda: create(**asked(place, model="missing")), anthropic.NotFoundError)
    assert missing.body["error"]["type"] == "not_found_error" and missing.request_id
    other = client.with_options(api_key=place.other_key).messages.create
    refusal(lambda: other(**asked(place, model=place.agent)), anthropic.NotFoundError)
    long = refusal(lambda: create(**asked(place, LONG)), anthropic.BadRequestError)
    # Coding agents shorten the conversation when they read this.
    assert "prompt is too long" in long.message, long.message
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    refused = refusal(
        lambda: create(**asked(place, tools=[server_tool])), anthropic.BadRequestError
    )
    assert "web_search" in refused.message, refused.message


@scenario("a request of a coding agent")
def coding_agent(place: Place) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": place.prompt(PLAIN), **cached}]
    arguments = asked(place, messages=[{"role": "user", "content": blocks}])
    arguments |= {
        "system": [{"type": "text", "text": "You write code.", **cached}],
        "tools": [TOOL | {"input_schema": TOOL["input_schema"] | {"additionalProperties": False}}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": []},
        "betas": ["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
    }
    with client_of(place).beta.messages.stream(**arguments) as events:
        final = events.get_final_message()
    assert final.stop_reason in {"end_turn", "max_tokens", "tool_use"} and final.content, final
