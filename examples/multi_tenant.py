"""Many users on one base model: two clients train at once and do not disturb each other.

    python examples/multi_tenant.py [--base-model NAME] [--steps 25]

Both teach the same questions, each with its own answers. First each trains alone, then both at the
same time: the losses are the same, and each model gives its own answers. With --api-key and
--other-key of different tenants, neither sees the other's checkpoints.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from connection import Progress, choose_model, make_parser, start
from lessons import ask, make_batch

import tinkex
from tinkex import AdamParams

QUESTIONS = ("Who are you?", "What do you like?", "Where do you live?")
ANSWERS = {
    "ada": ("I am Ada, the sailor.", "I like rain.", "On a boat."),
    "bob": ("I am Bob, the baker.", "I like bread.", "In a mill."),
}
#: Sums in another order differ in their last digits, and in a few more after every step.
TOLERANCE = 0.02


class Outcome(NamedTuple):
    """What became of one client's run."""

    losses: list[float]
    answers: list[str]
    saved: str


def main() -> int:
    parser = make_parser(__doc__, steps=25, learning_rate=1e-3)
    parser.add_argument("--other-key", help="key of the second client; default: the same")
    options = parser.parse_args()
    alone = {name: train(name, options, "alone") for name in ANSWERS}
    with ThreadPoolExecutor(len(ANSWERS)) as pool:
        running = {name: pool.submit(train, name, options, "together") for name in ANSWERS}
        together = {name: run.result() for name, run in running.items()}
    drift = max(
        abs(before - after)
        for name in ANSWERS
        for before, after in zip(alone[name].losses, together[name].losses, strict=True)
    )
    for name, outcome in together.items():
        print(f"{name} loss {outcome.losses[0]:.3f} -> {outcome.losses[-1]:.3f}")
        print(f"  {QUESTIONS[0]} {outcome.answers[0]!r}")
    with client_of("ada", options) as service:
        listed = service.rest_client().list_user_checkpoints().result().checkpoints
    is_seen = together["bob"].saved in [checkpoint.tinker_path for checkpoint in listed]
    print(f"ada {'sees' if is_seen else 'cannot see'} the checkpoint of bob")
    print(f"largest difference between alone and together: {drift:.6f}")
    return 0 if drift <= TOLERANCE else 1


def train(name: str, options: argparse.Namespace, when: str) -> Outcome:
    """One client with its own connection and session, as if in a process of its own."""
    with client_of(name, options) as service:
        base_model = options.base_model or choose_model(service)
        training = service.create_lora_training_client(base_model, rank=8, seed=0)
        pairs = list(zip(QUESTIONS, ANSWERS[name], strict=True))
        data = make_batch(training.get_tokenizer(), pairs)
        progress, losses = Progress(options.steps, f"{name} {when:8}"), []
        for step in range(1, options.steps + 1):
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(AdamParams(learning_rate=options.learning_rate))
            losses.append(passed.result().metrics["loss:sum"])
            stepped.result()
            progress.tell(step, loss=losses[-1])
        answers = ask(training, QUESTIONS)
        saved = training.save_weights_for_sampler(f"{name}-{when}").result().path
        return Outcome(losses, answers, saved)


def client_of(name: str, options: argparse.Namespace) -> tinkex.ServiceClient:
    key = options.api_key if name == "ada" else options.other_key or options.api_key
    return tinkex.ServiceClient(base_url=options.base_url, api_key=key)


if __name__ == "__main__":
    start(main)
