"""Supervised fine-tuning on one page: learn the assistant's answers.

    python examples/sft.py [--base-model NAME] [--steps 20]

It uses the server of this machine, or one named by --base-url and --api-key. `tinkex train sft`
does the same with batches, checkpoints and resume.
"""

from __future__ import annotations

from connection import Progress, answered, close, connect, make_parser, moved, new_adapter, start
from lessons import ask, make_batch, read_rows

import tinkex
from tinkex import AdamParams, Datum


def main() -> int:
    options = make_parser(__doc__, steps=20, learning_rate=1e-3).parse_args()
    talks = [row["messages"] for row in read_rows("sft.jsonl")]
    pairs = [(user["content"], assistant["content"]) for user, assistant in talks]
    questions = [question for question, _ in pairs]
    with connect(options) as (service, base_model):
        training = new_adapter(service, base_model)
        before = ask(training, questions)
        data = make_batch(training.get_tokenizer(), pairs)
        losses = train(training, data, options.steps, options.learning_rate)
        after = ask(training, questions)
        saved = training.save_weights_for_sampler("sft").result().path
    for question, *answers in zip(questions, before, after, strict=True):
        answered(question, dict(zip(("before", "after"), answers, strict=True)))
    moved("loss", losses[0], losses[-1])
    num_learned = sum(answer == taught for answer, (_, taught) in zip(after, pairs, strict=True))
    close(options, f"says {num_learned} of {len(pairs)} answers as taught", "chat", saved)
    return 0


def train(
    training: tinkex.TrainingClient, data: list[Datum], num_steps: int, learning_rate: float
) -> list[float]:
    """Train and return the loss of every step."""
    losses = []
    with Progress(num_steps) as progress:
        for step in range(1, num_steps + 1):
            # Send both before waiting for either; the order is preserved.
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(AdamParams(learning_rate=learning_rate))
            losses.append(passed.result().metrics["loss:sum"])
            stepped.result()
            progress.report(step, loss=losses[-1])
    return losses


if __name__ == "__main__":
    start(main)
