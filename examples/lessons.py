"""Shared by the examples: build training tokens from questions and answers, and sample answers."""

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
    """Read the rows of a JSONL file in examples/data."""
    text = (Path(__file__).parent / "data" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def prompt_tokens(tokenizer: Any, question: str) -> list[int]:
    """Return the prompt tokens of a question, with the model's chat template if it has one."""
    if getattr(tokenizer, "chat_template", None):
        return render_chat(tokenizer, [{"role": "user", "content": question}])
    return encode(tokenizer, f"Q: {question}\nA: ")


def answer_tokens(tokenizer: Any, answer: str) -> list[int]:
    """Return the tokens of an answer and the end token."""
    return [*encode(tokenizer, answer, add_special_tokens=False), tokenizer.eos_token_id]


def make_datum(prompt: Sequence[int], answer: Sequence[int], weights: Sequence[float]) -> Datum:
    """Build a datum; position i predicts token i + 1, and only the answer has weights."""
    tokens = [*prompt, *answer]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + list(weights),
        },
    )


def make_batch(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Datum]:
    """Build a batch whose weights sum to 1, so that its loss is a mean."""
    tokenized = [(prompt_tokens(tokenizer, q), answer_tokens(tokenizer, a)) for q, a in pairs]
    weight = 1.0 / sum(len(answer) for _, answer in tokenized)
    return [make_datum(prompt, answer, [weight] * len(answer)) for prompt, answer in tokenized]


def ask(
    training: tinkex.TrainingClient, questions: Sequence[str], max_tokens: int = 24
) -> list[str]:
    """Sample answers with the current weights, all questions concurrently."""
    tokenizer = training.get_tokenizer()
    sampler = training.save_weights_and_get_sampling_client().result()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompts = [ModelInput.from_ints(prompt_tokens(tokenizer, each)) for each in questions]
    with working(f"sampling answers to {len(questions)} questions"):
        futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
        return [text_of(tokenizer, future.result().sequences[0].tokens) for future in futures]


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decode an answer without the end token.

    Other special tokens are shown: in some models `<think>` is one.
    """
    content = [token for token in tokens if token != tokenizer.eos_token_id]
    return str(tokenizer.decode(content))
