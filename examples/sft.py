"""Supervised fine-tuning on one page: learn what the assistant says.

    python examples/sft.py                                         # a server inside this process
    python examples/sft.py --base-url https://host --api-key tml-... --base-model NAME

`tinkex train sft` does the same with batches, checkpoints and resume.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import tinkex
from tinkex import AdamParams, Datum, ModelInput
from tinkex.testing import StubServer, ToyTokenizer

DATA = Path(__file__).parent / "data" / "sft.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", help="server to use; default: one in this process")
    parser.add_argument("--api-key", default="tml-example", help="key for that server")
    parser.add_argument("--base-model", default="tinkex/bigram", help="model to train on")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {"base_url": options.base_url}
        if not options.base_url:
            server = stack.enter_context(StubServer(models=(options.base_model,)))
            settings = {"base_url": server.url, "tokenizer_loader": lambda name: ToyTokenizer()}
        service = stack.enter_context(tinkex.ServiceClient(api_key=options.api_key, **settings))
        training = service.create_lora_training_client(options.base_model, rank=8, seed=0)
        train(training, rows, options.steps)
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
