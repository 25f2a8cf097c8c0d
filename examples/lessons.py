"""Questions and answers as the examples use them: tokens to learn from, and questions to ask."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from screen import working

import tinkex
from tinkex import Datum, ModelInput, SamplingParams
from tinkex.text import encode, render_chat


def read_rows(name: str) -> list[Any]:
    """The rows of a file in examples/data, a JSON object per line."""
    text = (Path(__file__).parent / "data" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def prompt_tokens(tokenizer: Any, question: str) -> list[int]:
    """What stands in front of an answer, in the model's own chat layout if it has one."""
    if getattr(tokenizer, "chat_template", None):
        return render_chat(tokenizer, [{"role": "user", "content": question}])
    return encode(tokenizer, f"Q: {question}\nA: ")


def answer_tokens(tokenizer: Any, answer: str) -> list[int]:
    """An answer, and the token that says that it is over."""
    return [*encode(tokenizer, answer, add_special_tokens=False), tokenizer.eos_token_id]


def make_datum(prompt: Sequence[int], answer: Sequence[int], weights: Sequence[float]) -> Datum:
    """Position i predicts token i + 1; only the answer has weight, one number for each token."""
    tokens = [*prompt, *answer]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + list(weights),
        },
    )


def make_batch(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Datum]:
    """Questions with their answers; the weights of a batch add up to 1, so its loss is a mean."""
    told = [(prompt_tokens(tokenizer, q), answer_tokens(tokenizer, a)) for q, a in pairs]
    weight = 1.0 / sum(len(answer) for _, answer in told)
    return [make_datum(prompt, answer, [weight] * len(answer)) for prompt, answer in told]


def ask(
    training: tinkex.TrainingClient, questions: Sequence[str], max_tokens: int = 24
) -> list[str]:
    """What the weights of this moment answer; all questions are on their way at once."""
    tokenizer = training.get_tokenizer()
    sampler = training.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompts = [ModelInput.from_ints(prompt_tokens(tokenizer, each)) for each in questions]
    with working(f"{len(questions)} questions are asked"):
        asked = [sampler.sample(prompt, 1, params) for prompt in prompts]
        return [text_of(tokenizer, future.result().sequences[0].tokens) for future in asked]


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """An answer as text, without the token that ends it.

    Other special tokens are shown: in some models `<think>` is one.
    """
    kept = [token for token in tokens if token != tokenizer.eos_token_id]
    return str(tokenizer.decode(kept))
