"""An adapter of the built-in model that calls tools, reasons and follows up, in a few sentences.

Clients describe the same function in different JSON, which is part of the prompt; the adapter is
trained with several descriptions, so that it answers whatever a client writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tinkex
from tests.compat.clients.conversations import ANSWERS, BOTH, CALL, QUESTION, RESULT, SUM
from tinkex.text import encode

NUM_STEPS = 50
LEARNING_RATE = 0.004
RANK = 16
CITY = {"type": "string"}
#: The function as different clients describe it.
FUNCTIONS: tuple[dict[str, Any], ...] = (
    {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": CITY}}},
    {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
    },
    {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city."}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
)


def train_agent(service: tinkex.ServiceClient, base_model: str, tokenizer: Any) -> Any:
    """A training client whose weights know the conversations."""
    training = service.create_lora_training_client(base_model, rank=RANK, seed=0)
    data = [datum(tokenizer, *each) for each in lessons()]
    for _ in range(NUM_STEPS):
        passed = training.forward_backward(data, "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=LEARNING_RATE)).result()
        passed.result()
    return training


def lessons() -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]], str]]:
    """Messages, tools and the answer to learn."""
    question, both, addition = ({"role": "user", "content": each} for each in (QUESTION, BOTH, SUM))
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]}
    for function in FUNCTIONS:
        tools = [{"type": "function", "function": function}]
        yield [question], tools, ANSWERS[QUESTION]
        yield [both], tools, ANSWERS[BOTH]
        yield [question, called, {"role": "tool", "content": RESULT}], tools, ANSWERS[RESULT]
    yield [addition], [], ANSWERS[SUM]


def datum(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]], answer: str
) -> tinkex.Datum:
    """Predict the answer and the end of the turn."""
    prompt = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    learned = [*encode(tokenizer, answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = [*prompt, *learned]
    return tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0 / len(learned)] * len(learned),
        },
    )
