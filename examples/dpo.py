"""Direct preference optimization on one page: prefer one answer to another.

    python examples/dpo.py [--base-model NAME] [--steps 8]

The loss of a pair is -log sigmoid(m), with m = BETA * (gain of the chosen answer - gain of the
rejected one); a gain is the change of the log-probability since the start. `tinkex train dpo` does
the same with batches and resume.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from connection import Progress, answered, close, connect, make_parser, moved, new_adapter, start
from lessons import answer_tokens, ask, make_datum, prompt_tokens, read_rows
from screen import working

import tinkex
from tinkex import AdamParams, Datum

BETA = 0.1
#: Number of pairs in the eval split.
NUM_HELD_OUT = 6


def main() -> int:
    options = make_parser(__doc__, steps=8, learning_rate=5e-4).parse_args()
    rows = read_rows("dpo.jsonl")
    questions = [row["prompt"] for row in rows[-2:]]
    with connect(options) as (service, base_model):
        training = new_adapter(service, base_model)
        before = ask(training, questions)
        with working(f"scoring {len(rows)} pairs with the base model"):
            pairs = Pairs(training, rows[:-NUM_HELD_OUT])
            others = Pairs(training, rows[-NUM_HELD_OUT:])
        losses = train(training, pairs, options.steps, options.learning_rate)
        with working("scoring again"):
            margins, other_margins = pairs.margins(), others.margins()
        after = ask(training, questions)
        saved = training.save_weights_for_sampler("dpo").result().path
    for question, *answers in zip(questions, before, after, strict=True):
        answered(question, dict(zip(("before", "after"), answers, strict=True)))
    moved("loss", losses[0], fmean(map(loss_of, margins)))
    moved("margin", 0.0, fmean(margins))
    moved("held-out margin", 0.0, fmean(other_margins))
    achieved = f"leans to the chosen answer in {num_won(margins)} of {len(margins)} pairs it saw"
    unseen = f"{num_won(other_margins)} of {len(other_margins)} it did not see"
    close(options, f"{achieved}, and in {unseen}", "chat", saved)
    return 0


class Pairs:
    """Pairs of answers: chosen, rejected, chosen, rejected ..."""

    def __init__(self, training: tinkex.TrainingClient, rows: list[Any]) -> None:
        tokenizer = training.get_tokenizer()
        self._training = training
        self._answers = [
            (prompt_tokens(tokenizer, row["prompt"]), answer_tokens(tokenizer, row[name]))
            for row in rows
            for name in ("chosen", "rejected")
        ]
        # A new adapter does not change the model yet, so these are scores of the base model.
        self._start = self._scores()

    def margins(self) -> list[float]:
        """Return the margin of each pair under the current weights."""
        gains = [now - then for now, then in zip(self._scores(), self._start, strict=True)]
        return [BETA * (c - r) for c, r in zip(gains[0::2], gains[1::2], strict=True)]

    def data(self, weights: list[float]) -> list[Datum]:
        """Build a datum for each answer, with the given weight for its tokens."""
        return [
            make_datum(prompt, answer, [weight] * len(answer))
            for (prompt, answer), weight in zip(self._answers, weights, strict=True)
        ]

    def _scores(self) -> list[float]:
        """Return the log-probability of each answer."""
        data = self.data([1.0] * len(self._answers))
        scored = self._training.forward(data, "cross_entropy").result().loss_fn_outputs
        masks = [datum.loss_fn_inputs["weights"].array for datum in data]
        logprobs = [each["logprobs"].array for each in scored]
        return [float((one * mask).sum()) for one, mask in zip(logprobs, masks, strict=True)]


def train(
    training: tinkex.TrainingClient, pairs: Pairs, num_steps: int, learning_rate: float
) -> list[float]:
    """Train and return the loss before each step."""
    losses = []
    with Progress(num_steps) as progress:
        for step in range(1, num_steps + 1):
            margins = pairs.margins()
            losses.append(fmean(map(loss_of, margins)))
            # Cross entropy has the gradient -weight: use the gradient of the DPO loss as weights.
            weights = [BETA / (1.0 + math.exp(margin)) / len(margins) for margin in margins]
            data = pairs.data([sign * weight for weight in weights for sign in (1.0, -1.0)])
            training.forward_backward(data, "cross_entropy")
            training.optim_step(AdamParams(learning_rate=learning_rate)).result()
            progress.report(step, loss=losses[-1], margin=fmean(margins))
    return losses


def loss_of(margin: float) -> float:
    return math.log1p(math.exp(-margin))


def num_won(margins: list[float]) -> int:
    return sum(margin > 0 for margin in margins)


if __name__ == "__main__":
    start(main)
