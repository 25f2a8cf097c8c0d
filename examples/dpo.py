"""Direct preference optimization on one page: prefer one answer to another.

    python examples/dpo.py [--base-url https://host --api-key tml-... --base-model NAME]

The loss is -log sigmoid(beta * margin). `tinkex train dpo` does the same with batches and resume.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from connection import training_client

import tinkex
from tinkex import AdamParams, Datum, ModelInput

BETA = 0.1
DATA = Path(__file__).parent / "data" / "dpo.jsonl"


def main() -> None:
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    with training_client(__doc__, num_steps=20) as (training, num_steps):
        train(training, rows, num_steps)
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
