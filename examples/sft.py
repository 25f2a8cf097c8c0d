"""Supervised fine-tuning on one page: learn what the assistant says.

    python examples/sft.py [--base-model NAME] [--steps 25]

It uses the server of this machine, or one named by --base-url and --api-key. `tinkex train sft`
does the same with batches, checkpoints and resume.
"""

from __future__ import annotations

from connection import Progress, connect, make_parser, start
from lessons import ask, make_batch, read_rows

import tinkex
from tinkex import AdamParams, Datum


def main() -> int:
    options = make_parser(__doc__, steps=25, learning_rate=1e-3).parse_args()
    talks = [row["messages"] for row in read_rows("sft.jsonl")]
    pairs = [(user["content"], assistant["content"]) for user, assistant in talks]
    with connect(options) as (service, base_model):
        training = service.create_lora_training_client(base_model, rank=16, seed=0)
        question = pairs[0][0]
        before = ask(training, [question])[0]
        data = make_batch(training.get_tokenizer(), pairs)
        losses = train(training, data, options.steps, options.learning_rate)
        after = ask(training, [question])[0]
        saved = training.save_weights_for_sampler("sft").result().path
    print(f"{question}\n  before: {before!r}\n  after:  {after!r}\nsaved {saved}")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return 0


def train(
    training: tinkex.TrainingClient, data: list[Datum], num_steps: int, learning_rate: float
) -> list[float]:
    """The loss of every step."""
    progress, losses = Progress(num_steps), []
    for step in range(1, num_steps + 1):
        # Both are sent before either is waited for; the server keeps them in order.
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(AdamParams(learning_rate=learning_rate))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
        progress.tell(step, loss=losses[-1])
    return losses


if __name__ == "__main__":
    start(main)
