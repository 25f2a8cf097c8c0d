"""Direct preference optimization on one page: prefer one answer to another.

    python examples/dpo.py [--base-url https://host --api-key tml-... --base-model NAME]

The loss is -log sigmoid(beta * margin). `tinkex train dpo` does the same with batches and resume.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import tinkex
from tinkex import AdamParams, Datum, ModelInput
from tinkex.testing import StubServer, ToyTokenizer

BETA = 0.1
DATA = Path(__file__).parent / "data" / "dpo.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", help="server to use; default: one in this process")
    parser.add_argument("--api-key", default="tml-example", help="key for that server")
    parser.add_argument("--base-model", default="tinkex/bigram", help="model to train on")
    parser.add_argument("--steps", type=int, default=20)
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
        print(f"saved {training.save_weights_for_sampler('dpo').result().path}")


def train(training: tinkex.TrainingClient, rows: list[Any], num_steps: int) -> None:
    tokenizer = training.get_tokenizer()
    pairs = [(row["prompt"], row[name]) for row in rows for name in ("chosen", "rejected")]
    data = [make_datum(tokenizer, *pair, 1.0) for pair in pairs]
    start = scores(training, data)
    for step in range(1, num_steps + 1):
        moved = [now - then for now, then in zip(scores(training, data), start, strict=True)]
        margins = [BETA * (c - r) for c, r in zip(moved[0::2], moved[1::2], strict=True)]
        loss = fmean(math.log1p(math.exp(-margin)) for margin in margins)
        # Cross entropy has the slope -weight, and this is the slope of the loss above.
        pulls = [s * BETA / (1 + math.exp(m)) / len(margins) for m in margins for s in (1, -1)]
        weighted = [make_datum(tokenizer, *p, w) for p, w in zip(pairs, pulls, strict=True)]
        training.forward_backward(weighted, "cross_entropy")
        training.optim_step(AdamParams(learning_rate=0.05)).result()
        print(f"step {step:3}   loss {loss:.4f}   margin {fmean(margins):+.3f}")


def scores(training: tinkex.TrainingClient, data: list[Datum]) -> list[float]:
    """The log-probability of each answer."""
    scored = training.forward(data, "cross_entropy").result().loss_fn_outputs
    masks = (datum.loss_fn_inputs["weights"].array for datum in data)
    return [float((each["logprobs"].array * next(masks)).sum()) for each in scored]


def make_datum(tokenizer: Any, prompt: str, answer: str, weight: float) -> Datum:
    """Position i predicts token i + 1; only the answer has weight."""
    start = tokenizer.encode(prompt)
    tokens = [*start, *tokenizer.encode(answer), tokenizer.eos_token_id]
    weights = [0.0] * (len(start) - 1) + [weight] * (len(tokens) - len(start))
    targets = {"target_tokens": tokens[1:], "weights": weights}
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=targets)


if __name__ == "__main__":
    main()
