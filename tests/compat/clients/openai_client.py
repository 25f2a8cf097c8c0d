"""The official client of the OpenAI API: chat, text, streams, tools, errors."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import openai
from pydantic import BaseModel

from tests.compat.clients.conversations import (
    ANSWER,
    BOTH,
    BOTH_CALLS,
    CALL,
    COUNT,
    FIELDS,
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
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 80}


def client_of(place: Place, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": place.openai_url, "api_key": place.key, **options})


def asked(place: Place, text: str = PLAIN, **options: Any) -> dict[str, Any]:
    """The arguments of a request."""
    messages = [{"role": "user", "content": place.prompt(text)}]
    return {"model": place.base_model, "messages": messages, **GREEDY, **options}


def refusal(call: Callable[[], Any], kind: type[openai.APIStatusError]) -> Any:
    """The error that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("the call was accepted")


@scenario("`chat.completions.create`")
def create(place: Place) -> None:
    answer = client_of(place).chat.completions.create(**asked(place))
    choice = answer.choices[0]
    assert choice.message.content == PLAIN_ANSWER, answer
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop"), answer
    assert answer.object == "chat.completion" and answer.model == place.base_model, answer
    usage = answer.usage
    assert usage and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, answer
    assert answer._request_id, answer


@scenario("both base URLs")
def base_urls(place: Place) -> None:
    for path in ("/v1", "/oai/api/v1", "/oai/api/v1/"):
        client = client_of(place, base_url=place.url + path)
        answer = client.chat.completions.create(**asked(place))
        assert answer.choices[0].message.content == PLAIN_ANSWER, answer


@scenario("`stream=True`, with usage")
def stream(place: Place) -> None:
    whole = client_of(place).chat.completions.create(**asked(place))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client_of(place).chat.completions.create(**asked(place, **options)))
    deltas = [choice.delta.content or "" for each in chunks for choice in each.choices]
    assert "".join(deltas) == whole.choices[0].message.content, chunks
    assert chunks[0].choices[0].delta.role == "assistant", chunks[0]
    assert [each.usage for each in chunks[:-1]] == [None] * (len(chunks) - 1), chunks
    last, told = chunks[-1].usage, whole.usage
    assert chunks[-1].choices == [] and last and told, chunks[-1]
    assert last.completion_tokens == told.completion_tokens, (last, told)
    assert last.prompt_tokens == told.prompt_tokens, (last, told)
    assert len({each.id for each in chunks}) == 1, chunks
    assert chunks[-2].choices[0].finish_reason == "stop", chunks


@scenario("the stream helper of the SDK")
def stream_helper(place: Place) -> None:
    with client_of(place).chat.completions.stream(**asked(place)) as events:
        kinds = [each.type for each in events]
        final = events.get_final_completion()
    assert "content.done" in kinds, kinds
    assert final.choices[0].message.content == PLAIN_ANSWER, final


@scenario("a long answer arrives in parts")
def incremental(place: Place) -> None:
    # A stop text that never comes holds back nothing but its own beginnings.
    options = {"stream": True, "stop": ["no such text"], "seed": 5}
    arguments = asked(place, "Tell me a story about a cat.", **options)
    answer = client_of(place).chat.completions.create(**arguments)
    num_parts = sum(bool(each.choices[0].delta.content) for each in answer)
    # The fake engine needs no time for an answer.
    assert num_parts > (0 if place.is_scripted else 1), num_parts


@scenario("`with_raw_response`, `with_streaming_response`")
def raw(place: Place) -> None:
    client = client_of(place)
    response = client.chat.completions.with_raw_response.create(**asked(place))
    assert response.headers["x-request-id"] and response.status_code == 200
    assert response.parse().choices[0].message.content == PLAIN_ANSWER
    with client.chat.completions.with_streaming_response.create(
        **asked(place, stream=True)
    ) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)


@scenario("async client, many requests at once")
def many(place: Place) -> None:
    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=place.openai_url, api_key=place.key) as client:
            one = (client.chat.completions.create(**asked(place)) for _ in range(16))
            return await asyncio.gather(*one)

    answers = asyncio.run(run())
    assert {each.choices[0].message.content for each in answers} == {PLAIN_ANSWER}


@scenario("async streams")
def async_streams(place: Place) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=place.openai_url, api_key=place.key) as client:

            async def one() -> str:
                chunks = await client.chat.completions.create(**asked(place, stream=True))
                parts = [part.choices[0].delta.content or "" async for part in chunks]
                return "".join(parts)

            return await asyncio.gather(*(one() for _ in range(8)))

    assert set(asyncio.run(run())) == {PLAIN_ANSWER}


@scenario("`n`, `seed`")
def several(place: Place) -> None:
    arguments = asked(place, "Tell me a story about a cat.", n=3, seed=7, temperature=1.5)
    once, again = (client_of(place).chat.completions.create(**arguments) for _ in range(2))
    texts = [choice.message.content for choice in once.choices]
    assert len(texts) == 3 and [each.index for each in once.choices] == [0, 1, 2], once
    assert texts == [choice.message.content for choice in again.choices], (once, again)
    assert len(set(texts)) > 1, texts
    chunks = client_of(place).chat.completions.create(**arguments, stream=True)
    parts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert parts == texts, (parts, texts)


@scenario("`logprobs`, `top_logprobs`")
def logprobs(place: Place) -> None:
    # A scripted answer is not the most probable one.
    arguments = asked(place, "What?", logprobs=True, top_logprobs=3, max_tokens=8)
    answer = client_of(place).chat.completions.create(**arguments)
    scores = answer.choices[0].logprobs
    assert scores and scores.content, answer
    for each in scores.content:
        assert each.logprob <= 0 and len(each.top_logprobs) == 3, each
        # Greedy: the token that was sampled is the most probable one.
        assert math.isclose(each.logprob, each.top_logprobs[0].logprob, abs_tol=1e-6), each
    assert bytes(scores.content[0].bytes or ()).decode() == scores.content[0].token, scores
    streamed = [
        score
        for chunk in client_of(place).chat.completions.create(**arguments, stream=True)
        for choice in chunk.choices
        for score in (choice.logprobs.content or [] if choice.logprobs else [])
    ]
    assert [each.logprob for each in streamed] == [each.logprob for each in scores.content]


@scenario("`stop`, `max_completion_tokens`, `finish_reason`")
def limits(place: Place) -> None:
    client = client_of(place)
    count = asked(place, COUNT)
    free = client.chat.completions.create(**count).choices[0].message.content
    assert free and "5" in free, free
    cut = client.chat.completions.create(**count, stop="5").choices[0]
    assert (cut.message.content, cut.finish_reason) == (free.split("5")[0], "stop"), cut
    short = client.chat.completions.create(**count | {"max_completion_tokens": 1})
    assert short.choices[0].finish_reason == "length" and short.usage, short
    assert short.usage.completion_tokens == 1, short


@scenario("a history with an answer without text")
def empty_answer(place: Place) -> None:
    arguments = asked(place)
    empty = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]
    arguments["messages"] = [*empty, *arguments["messages"]]
    assert client_of(place).chat.completions.create(**arguments).choices


@scenario("a loop with tools")
def tools(place: Place) -> None:
    client = client_of(place)
    arguments = asked(place, QUESTION, model=place.agent, tools=[TOOL])
    first = client.chat.completions.create(**arguments).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.tool_calls, first
    [call] = first.message.tool_calls
    assert call.function.name == CALL["name"], first
    assert json.loads(call.function.arguments) == CALL["arguments"], first
    arguments["messages"] += [
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": place.prompt(RESULT)},
    ]
    last = client.chat.completions.create(**arguments).choices[0]
    assert (last.message.content, last.finish_reason) == (ANSWER, "stop"), last


@scenario("streamed and parallel tool calls")
def tool_stream(place: Place) -> None:
    arguments = asked(place, BOTH, model=place.agent, tools=[TOOL])
    with client_of(place).chat.completions.stream(**arguments) as events:
        for _ in events:
            pass
        final = events.get_final_completion().choices[0]
    calls = final.message.tool_calls or []
    found = [
        {"name": each.function.name, "arguments": json.loads(each.function.arguments)}
        for each in calls
    ]
    assert found == [*BOTH_CALLS] and final.finish_reason == "tool_calls", final
    assert len({each.id for each in calls}) == 2, calls
    one = client_of(place).chat.completions.create(**arguments, parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls or []) == 1, one


@scenario("`tool_choice`: none, required, a function")
def tool_choice(place: Place) -> None:
    client = client_of(place)
    arguments = asked(place, QUESTION, model=place.agent, tools=[TOOL])
    none = client.chat.completions.create(**arguments, tool_choice="none").choices[0]
    assert none.message.tool_calls is None, none
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, said in (("required", FORCED), (named, FORCED_ARGUMENTS)):
        arguments["messages"][0]["content"] = place.prompt(QUESTION, said)
        forced = client.chat.completions.create(**arguments, tool_choice=choice).choices[0]
        calls = forced.message.tool_calls or []
        assert [each.function.name for each in calls] == ["get_weather"], forced


@scenario("reasoning as `reasoning_content`")
def reasoning(place: Place) -> None:
    arguments = asked(place, SUM, model=place.agent)
    message = client_of(place).chat.completions.create(**arguments).choices[0].message
    assert message.content == SUM_ANSWER, message
    assert message.to_dict()["reasoning_content"].strip() == SUM_REASONING, message
    thought, said = "", ""
    for chunk in client_of(place).chat.completions.create(**arguments, stream=True):
        delta = chunk.choices[0].delta
        thought += delta.to_dict().get("reasoning_content") or ""
        said += delta.content or ""
    assert (thought, said) == (message.to_dict()["reasoning_content"], SUM_ANSWER)


class Sum(BaseModel):
    """An answer as fields."""

    left: int
    right: int


@scenario("`chat.completions.parse` with a schema")
def parse(place: Place) -> None:
    arguments = asked(place, FIELDS, response_format=Sum, max_tokens=60)
    answer = client_of(place).chat.completions.parse(**arguments).choices[0]
    assert isinstance(answer.message.parsed, Sum), answer


@scenario("text completions: texts, tokens, `echo` with log-probabilities")
def text(place: Place) -> None:
    client = client_of(place)
    prompts = ["A cat", "A dog and a"]
    arguments = {"model": place.base_model, "temperature": 0.0, "max_tokens": 4}
    both = client.completions.create(**arguments, prompt=prompts, n=2, logprobs=1)
    assert [each.index for each in both.choices] == [0, 1, 2, 3], both
    echoed = client.completions.create(
        **arguments | {"max_tokens": 1}, prompt=prompts[1], echo=True, logprobs=2
    ).choices[0]
    assert echoed.text.startswith(prompts[1]) and echoed.logprobs, echoed
    scores = echoed.logprobs.token_logprobs or []
    assert scores[0] is None and all(each <= 0 for each in scores[1:]), scores
    assert echoed.logprobs.text_offset and echoed.logprobs.text_offset[0] == 0, echoed
    [streamed] = ["".join(text_parts(client, arguments | {"prompt": prompts[0]}))]
    assert streamed == both.choices[0].text, (streamed, both)


def text_parts(client: openai.OpenAI, arguments: dict[str, Any]) -> list[str]:
    return [each.choices[0].text for each in client.completions.create(**arguments, stream=True)]


@scenario("`models.list`, `models.retrieve`")
def models(place: Place) -> None:
    client = client_of(place)
    names = [each.id for each in client.models.list()]
    assert place.base_model in names and place.agent in names, names
    for name in (place.base_model, place.agent):
        assert client.models.retrieve(name).id == name


@scenario("short names of checkpoints")
def names(place: Place) -> None:
    client = client_of(place)
    run, _, name = place.agent.removeprefix("tinker://").split("/")
    for short in (f"{run}/{name}", f"{run}@latest", f"{place.base_model};{place.agent}"):
        answer = client.chat.completions.create(**asked(place, SUM, model=short))
        assert answer.choices[0].message.content == SUM_ANSWER, (short, answer)
        assert answer.model == short, answer


@scenario("error classes")
def errors(place: Place) -> None:
    client = client_of(place, max_retries=0)
    create = client.chat.completions.create
    wrong = client.with_options(api_key="tml-wrong").chat.completions.create
    assert refusal(lambda: wrong(**asked(place)), openai.AuthenticationError).code
    missing = refusal(lambda: create(**asked(place, model="missing")), openai.NotFoundError)
    assert missing.code == "model_not_found" and missing.request_id, missing.body
    other = client.with_options(api_key=place.other_key).chat.completions.create
    refusal(lambda: other(**asked(place, model=place.agent)), openai.NotFoundError)
    long = refusal(lambda: create(**asked(place, LONG)), openai.BadRequestError)
    assert long.code == "context_length_exceeded", long.body
    assert "This model's maximum context length is" in long.message, long.message
    bad = refusal(lambda: create(**asked(place, temperature=9.0)), openai.BadRequestError)
    assert bad.param == "temperature", bad.body
    bias = refusal(lambda: create(**asked(place, logit_bias={"5": 2})), openai.BadRequestError)
    assert bias.param == "logit_bias", bias.body


@scenario("a timeout of the client cancels")
def timeout(place: Place) -> None:
    arguments = {"model": place.base_model, "prompt": ["Once upon"] * 128, "n": 8}
    try:
        client_of(place, timeout=0.1, max_retries=0).completions.create(**arguments, max_tokens=400)
    except openai.APITimeoutError:
        create(place)
    else:
        raise AssertionError("the answer came within the timeout")
