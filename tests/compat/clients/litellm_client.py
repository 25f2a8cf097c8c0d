"""litellm with its providers `openai/`, `text-completion-openai/` and `anthropic/`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

# The prices of models come from the package, not from the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

from tests.compat.clients.conversations import (
    ANSWER,
    BOTH,
    BOTH_CALLS,
    CALL,
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

litellm.telemetry = False
litellm.num_retries = 0
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


def asked(place: Place, provider: str, text: str = PLAIN, **options: Any) -> dict[str, Any]:
    """The arguments of a request."""
    model = options.pop("model", place.base_model)
    base = place.url if provider == "anthropic" else place.openai_url
    return {
        "model": f"{provider}/{model}",
        "api_base": base,
        "api_key": place.key,
        "messages": [{"role": "user", "content": place.prompt(text)}],
        "max_tokens": 80,
        "temperature": 0.0,
        **options,
    }


def refusal(call: Callable[[], Any], kind: type[Exception]) -> Exception:
    """The error that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("the call was accepted")


@scenario("`openai/` and `anthropic/`: completion")
def completion(place: Place) -> None:
    for provider in ("openai", "anthropic"):
        answer = litellm.completion(**asked(place, provider))
        assert answer.choices[0].message.content == PLAIN_ANSWER, (provider, answer)
        assert answer.usage.completion_tokens > 0, (provider, answer)


@scenario("streams, with usage")
def stream(place: Place) -> None:
    for provider in ("openai", "anthropic"):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(litellm.completion(**asked(place, provider, **options)))
        whole = litellm.stream_chunk_builder(chunks)
        assert whole.choices[0].message.content == PLAIN_ANSWER, (provider, chunks)
        told = litellm.completion(**asked(place, provider)).usage
        assert whole.usage.completion_tokens == told.completion_tokens, (provider, whole, told)
        assert whole.usage.prompt_tokens == told.prompt_tokens, (provider, whole, told)


@scenario("async completion and stream")
def async_calls(place: Place) -> None:
    async def run(provider: str) -> list[str]:
        answer = await litellm.acompletion(**asked(place, provider))
        chunks = await litellm.acompletion(**asked(place, provider, stream=True))
        parts = [chunk.choices[0].delta.content or "" async for chunk in chunks]
        return [answer.choices[0].message.content, "".join(parts)]

    for provider in ("openai", "anthropic"):
        assert asyncio.run(run(provider)) == [PLAIN_ANSWER, PLAIN_ANSWER], provider


@scenario("`text-completion-openai/`")
def text(place: Place) -> None:
    for stream in (False, True):
        arguments = asked(place, "text-completion-openai", stream=stream) | {"prompt": "A cat"}
        del arguments["messages"]
        answer = litellm.text_completion(**arguments)
        if stream:
            assert isinstance("".join(each.choices[0].text or "" for each in answer), str)
        else:
            assert answer.choices[0].text is not None, answer


@scenario("a loop with tools, also streamed")
def tools(place: Place) -> None:
    for provider in ("openai", "anthropic"):
        arguments = asked(place, provider, QUESTION, model=place.agent, tools=[TOOL])
        first = litellm.completion(**arguments).choices[0]
        [call] = first.message.tool_calls
        assert first.finish_reason == "tool_calls", (provider, first)
        assert json.loads(call.function.arguments) == CALL["arguments"], (provider, first)
        result = {"role": "tool", "tool_call_id": call.id, "content": place.prompt(RESULT)}
        arguments["messages"] += [first.message.model_dump(), result]
        last = litellm.completion(**arguments).choices[0]
        assert last.message.content == ANSWER, (provider, last)
        both = asked(place, provider, BOTH, model=place.agent, tools=[TOOL], stream=True)
        whole = litellm.stream_chunk_builder(list(litellm.completion(**both)))
        found = [
            {"name": each.function.name, "arguments": json.loads(each.function.arguments)}
            for each in whole.choices[0].message.tool_calls
        ]
        assert found == [*BOTH_CALLS], (provider, whole)


@scenario("`reasoning_content` from both families")
def reasoning(place: Place) -> None:
    for provider in ("openai", "anthropic"):
        answer = litellm.completion(**asked(place, provider, SUM, model=place.agent))
        message = answer.choices[0].message
        assert message.content == SUM_ANSWER, (provider, message)
        assert message.reasoning_content.strip() == SUM_REASONING, (provider, message)


@scenario("exceptions, such as a prompt that is too long")
def errors(place: Place) -> None:
    for provider in ("openai", "anthropic"):
        for options, kind in (
            ({"text": LONG}, litellm.ContextWindowExceededError),
            ({"api_key": "tml-wrong"}, litellm.AuthenticationError),
            ({"model": "missing"}, litellm.NotFoundError),
        ):
            arguments = asked(place, provider, **options)
            refusal(lambda arguments=arguments: litellm.completion(**arguments), kind)
    arguments = asked(place, "openai", temperature=9.0)
    refusal(lambda: litellm.completion(**arguments), litellm.BadRequestError)
