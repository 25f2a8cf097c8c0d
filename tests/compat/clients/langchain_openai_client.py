"""langchain-openai: chat and text models, bound tools, structured output, streams."""

from __future__ import annotations

import asyncio
import os
from typing import Any

os.environ["LANGSMITH_TRACING"] = "false"

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from tests.compat.clients.conversations import (
    ANSWER,
    BOTH,
    BOTH_CALLS,
    CALL,
    FIELDS,
    LONG,
    PLAIN,
    PLAIN_ANSWER,
    QUESTION,
    RESULT,
)
from tests.compat.clients.registry import Place, scenario


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return RESULT


class Sum(BaseModel):
    """The numbers of an addition."""

    left: int
    right: int


def chat(place: Place, model: str = "", **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=model or place.base_model,
        base_url=place.openai_url,
        api_key=place.key,
        temperature=0.0,
        max_tokens=80,
        max_retries=0,
        **options,
    )


@scenario("`ChatOpenAI`: invoke, batch")
def invoke(place: Place) -> None:
    answer = chat(place).invoke(place.prompt(PLAIN))
    assert answer.content == PLAIN_ANSWER, answer
    assert answer.usage_metadata["output_tokens"] > 0, answer
    assert answer.response_metadata["finish_reason"] == "stop", answer
    answers = chat(place).batch([place.prompt(PLAIN)] * 4)
    assert {each.content for each in answers} == {PLAIN_ANSWER}


@scenario("streams, with usage")
def stream(place: Place) -> None:
    whole = None
    for chunk in chat(place, stream_usage=True).stream(place.prompt(PLAIN)):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.content == PLAIN_ANSWER, whole
    assert whole.usage_metadata["output_tokens"] > 0, whole

    async def run() -> str:
        parts = chat(place).astream(place.prompt(PLAIN))
        return "".join([str(part.content) async for part in parts])

    assert asyncio.run(run()) == PLAIN_ANSWER


@scenario("`bind_tools`: a loop")
def tools(place: Place) -> None:
    model = chat(place, place.agent).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(place.prompt(QUESTION))]
    first = model.invoke(messages)
    [call] = first.tool_calls
    assert (call["name"], call["args"]) == (CALL["name"], CALL["arguments"]), first
    messages += [first, ToolMessage(place.prompt(RESULT), tool_call_id=call["id"])]
    assert model.invoke(messages).content == ANSWER


@scenario("streamed tool calls, merged by index")
def tool_stream(place: Place) -> None:
    whole = None
    for chunk in chat(place, place.agent).bind_tools([get_weather]).stream(place.prompt(BOTH)):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    found = [{"name": each["name"], "arguments": each["args"]} for each in whole.tool_calls]
    assert found == [*BOTH_CALLS], whole


@scenario("`with_structured_output`: a schema, a function")
def structured(place: Place) -> None:
    by_schema = chat(place).with_structured_output(Sum, method="json_schema")
    assert isinstance(by_schema.invoke(place.prompt(FIELDS)), Sum)
    by_call = chat(place, place.agent).with_structured_output(get_weather.args_schema)
    assert by_call is not None


@scenario("`logprobs`, `stop`, `n`")
def options(place: Place) -> None:
    model = chat(place).bind(logprobs=True, top_logprobs=2)
    scores = model.invoke(place.prompt(PLAIN)).response_metadata["logprobs"]
    assert scores["content"][0]["top_logprobs"], scores
    several = chat(place, n=2).generate([[HumanMessage(place.prompt(PLAIN))]])
    assert len(several.generations[0]) == 2, several
    assert chat(place).invoke(place.prompt(PLAIN), stop=[PLAIN_ANSWER]).content == ""


@scenario("`OpenAI`: text")
def text(place: Place) -> None:
    model = OpenAI(
        model=place.base_model, base_url=place.openai_url, api_key=place.key, max_tokens=8
    )
    assert isinstance(model.invoke("A cat"), str)
    assert isinstance("".join(model.stream("A cat")), str)
    assert len(model.batch(["A cat", "A dog"])) == 2


@scenario("a prompt that is too long")
def too_long(place: Place) -> None:
    try:
        chat(place).invoke(LONG)
    except ContextOverflowError:
        return
    raise AssertionError("the prompt was accepted")
