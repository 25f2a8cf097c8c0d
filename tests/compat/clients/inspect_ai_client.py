"""inspect-ai with its provider `openai-api`: chat, tools, scores, an evaluation."""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import Any

os.environ["INSPECT_DISPLAY"] = "none"

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageTool,
    ChatMessageUser,
    ContentReasoning,
    GenerateConfig,
    Model,
    ModelOutput,
    get_model,
)
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from inspect_ai.tool import Tool, tool

from tests.compat.clients.conversations import (
    ANSWER,
    CALL,
    COUNT,
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

GREEDY = {"temperature": 0.0, "max_tokens": 80}


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """The weather in a city.

        Args:
            city: The name of the city.
        """
        return RESULT

    return execute


def model_of(place: Place, name: str = "", provider: str = "openai-api", **options: Any) -> Model:
    return get_model(
        f"{provider}/tinkex/{name or place.base_model}",
        base_url=place.openai_url,
        api_key=place.key,
        memoize=False,
        config=GenerateConfig(**GREEDY | {"max_retries": 0} | options),
    )


def answer_of(model: Model, given: str | list[ChatMessage], **options: Any) -> ModelOutput:
    return asyncio.run(model.generate(given, **options))


@scenario("`openai-api/tinkex/<model>`: chat")
def chat(place: Place) -> None:
    output = answer_of(model_of(place), place.prompt(PLAIN))
    assert (output.completion, output.stop_reason) == (PLAIN_ANSWER, "stop"), output
    assert output.usage and output.usage.output_tokens > 0, output


@scenario("a checkpoint, and a loop with tools")
def tools(place: Place) -> None:
    model = model_of(place, place.agent)
    messages: list[ChatMessage] = [ChatMessageUser(content=place.prompt(QUESTION))]
    first = answer_of(model, messages, tools=[get_weather()])
    [call] = first.message.tool_calls or []
    assert (call.function, call.arguments) == (CALL["name"], CALL["arguments"]), first
    assert first.stop_reason == "tool_calls", first
    result = ChatMessageTool(content=place.prompt(RESULT), tool_call_id=call.id)
    last = answer_of(model, [*messages, first.message, result], tools=[get_weather()])
    assert last.completion == ANSWER, last


@scenario("`logprobs`, `num_choices`, `stop_seqs`")
def options(place: Place) -> None:
    scored = answer_of(model_of(place, logprobs=True, top_logprobs=2), place.prompt(PLAIN))
    scores = scored.choices[0].logprobs
    assert scores and len(scores.content[0].top_logprobs or []) == 2, scored
    several = answer_of(model_of(place, num_choices=3), place.prompt(PLAIN))
    assert [each.message.text for each in several.choices] == [PLAIN_ANSWER] * 3, several
    cut = answer_of(model_of(place, stop_seqs=["5"]), place.prompt(COUNT))
    assert "4" in cut.completion and "5" not in cut.completion, cut


@scenario("reasoning")
def reasoning(place: Place) -> None:
    output = answer_of(model_of(place, place.agent), place.prompt(SUM))
    content = output.message.content
    assert isinstance(content, list) and isinstance(content[0], ContentReasoning), output
    assert content[0].reasoning.strip() == SUM_REASONING, output
    assert output.completion.strip() == SUM_ANSWER, output


@scenario("streams")
def stream(place: Place) -> None:
    model = get_model(
        f"openai-api/tinkex/{place.base_model}",
        base_url=place.openai_url,
        api_key=place.key,
        memoize=False,
        stream=True,
        config=GenerateConfig(**GREEDY),
    )
    output = answer_of(model, place.prompt(PLAIN))
    assert output.completion == PLAIN_ANSWER and output.usage, output
    assert output.usage.output_tokens > 0, output


@scenario("`openai-api-completions`: text with `echo`")
def text(place: Place) -> None:
    model = model_of(place, provider="openai-api-completions", max_tokens=4, logprobs=True)
    assert answer_of(model, "A cat").choices, "a choice"


@scenario("a prompt that is too long ends with `model_length`")
def too_long(place: Place) -> None:
    assert answer_of(model_of(place), LONG).stop_reason == "model_length"


@scenario("an evaluation of many samples at once")
def evaluation(place: Place) -> None:
    samples = [Sample(input=place.prompt(PLAIN), target=PLAIN_ANSWER) for _ in range(24)]
    task = Task(dataset=samples, solver=generate(), scorer=match())
    with tempfile.TemporaryDirectory() as folder:
        [log] = eval(task, model=model_of(place, max_connections=16), log_dir=folder)
    assert log.status == "success" and log.results, log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1.0, log.results
