"""Supervised fine-tuning on one page: learn what the assistant says.

    python examples/sft.py                                         # a server inside this process
    python examples/sft.py --base-url https://host --api-key tml-... --base-model NAME

`tinkex train sft` does the same with batches, checkpoints and resume.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from connection import training_client

import tinkex
from tinkex import AdamParams, Datum, ModelInput

DATA = Path(__file__).parent / "data" / "sft.jsonl"


def main() -> None:
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    with training_client(__doc__, num_steps=40) as (training, num_steps):
        train(training, rows, num_steps)
        print(f"saved {training.save_weights_for_sampler('sft').result().path}")


def train(training: tinkex.TrainingClient, rows: list[Any], num_steps: int) -> None:
    tokenizer = training.get_tokenizer()
    data = [make_datum(tokenizer, row["messages"]) for row in rows]
    num_learned = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in data)
    for step in range(1, num_steps + 1):
        # Both are sent before either is waited for; the server keeps them in order.
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(AdamParams(learning_rate=0.1))
        loss = passed.result().metrics["loss:sum"] / num_learned
        stepped.result()
        print(f"step {step:3}   loss {loss:.3f}", flush=True)


def make_datum(tokenizer: Any, messages: list[dict[str, str]]) -> Datum:
    """Position i predicts token i + 1; only the last answer has weight.

    A model with a chat template wants tokenizer.apply_chat_template() here.
    """
    *before, last = messages
    lines = [f"{message['role']}: {message['content']}\n" for message in before]
    start = tokenizer.encode("".join(lines) + "assistant: ")
    tokens = [*start, *tokenizer.encode(last["content"]), tokenizer.eos_token_id]
    weights = [0.0] * (len(start) - 1) + [1.0] * (len(tokens) - len(start))
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


if __name__ == "__main__":
    main()
