"""Many users on one base model: two clients train at once without affecting each other.

    python examples/multi_tenant.py [--base-model NAME] [--steps 15]

Both train on the same questions, each with its own answers: first one after the other, then both at
the same time. The losses are the same, and each model gives its own answers. With --api-key and
--other-key of different tenants, neither sees the other's checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from connection import (
    Progress,
    answered,
    close,
    connect,
    make_parser,
    moved,
    new_adapter,
    open_client,
    start,
)
from lessons import ask, make_batch

import tinkex
from tinkex import AdamParams, Datum

QUESTIONS = ("Who are you?", "What do you like?", "Where do you live?")
ANSWERS = {
    "ada": ("I am Ada, the sailor.", "I like rain.", "On a boat."),
    "bob": ("I am Bob, the baker.", "I like bread.", "In a mill."),
}
#: Sums in another order differ in their last digits; the difference grows with every step.
TOLERANCE = 0.02


class Tenant(NamedTuple):
    """A user with a separate connection and adapter."""

    name: str
    training: tinkex.TrainingClient
    data: list[Datum]


class Trained(NamedTuple):
    """The losses and the duration of a run."""

    losses: dict[str, list[float]]
    seconds: float


def main() -> int:
    parser = make_parser(__doc__, steps=15, learning_rate=1e-3)
    parser.add_argument("--other-key", help="key of the second client; default: the same")
    options = parser.parse_args()
    with open_services(options) as (services, base_model):
        alone = [
            train([make_tenant(name, service, base_model)], options, f"{name} alone  ")
            for name, service in services.items()
        ]
        tenants = [make_tenant(name, service, base_model) for name, service in services.items()]
        together = train(tenants, options, "both at once")
        answers_by_name = {tenant.name: ask(tenant.training, QUESTIONS) for tenant in tenants}
        saved = {tenant.name: save(tenant) for tenant in tenants}
        listed = services["ada"].rest_client().list_user_checkpoints().result().checkpoints
    for at, question in enumerate(QUESTIONS):
        answered(question, {name: answers[at] for name, answers in answers_by_name.items()})
    is_seen = saved["bob"] in [checkpoint.tinker_path for checkpoint in listed]
    shared = "" if options.other_key else "both use the same key: "
    print(f"{shared}ada {'sees' if is_seen else 'cannot see'} the checkpoint of bob")
    check(alone, together)
    num_own = sum(tuple(answers) == ANSWERS[name] for name, answers in answers_by_name.items())
    achieved = (
        f"{num_own} of {len(answers_by_name)} clients gave their own answers, with losses as alone"
    )
    close(options, achieved, "chat", saved["bob"])
    return 0


@contextlib.contextmanager
def open_services(
    options: argparse.Namespace,
) -> Iterator[tuple[dict[str, tinkex.ServiceClient], str]]:
    """Open a connection per client and choose the base model."""
    other_key = options.other_key or options.api_key
    with connect(options) as (ada, base_model), open_client(options, other_key) as bob:
        yield {"ada": ada, "bob": bob}, base_model


def make_tenant(name: str, service: tinkex.ServiceClient, base_model: str) -> Tenant:
    training = new_adapter(service, base_model, rank=8)
    pairs = list(zip(QUESTIONS, ANSWERS[name], strict=True))
    return Tenant(name, training, make_batch(training.get_tokenizer(), pairs))


def train(tenants: list[Tenant], options: argparse.Namespace, label: str) -> Trained:
    """Train all clients step by step: send the requests of all before waiting for any."""
    losses: dict[str, list[float]] = {tenant.name: [] for tenant in tenants}
    params = AdamParams(learning_rate=options.learning_rate)
    started = time.monotonic()
    with Progress(options.steps, label) as progress:
        for step in range(1, options.steps + 1):
            sent = [
                (
                    each.training.forward_backward(each.data, "cross_entropy"),
                    each.training.optim_step(params),
                )
                for each in tenants
            ]
            for tenant, (passed, stepped) in zip(tenants, sent, strict=True):
                losses[tenant.name].append(passed.result().metrics["loss:sum"])
                stepped.result()
            progress.report(step, **{name: values[-1] for name, values in losses.items()})
    return Trained(losses, time.monotonic() - started)


def save(tenant: Tenant) -> str:
    return tenant.training.save_weights_for_sampler(tenant.name).result().path


def check(alone: list[Trained], together: Trained) -> None:
    """Compare the losses; exit with an error if they differ by more than rounding."""
    drift = 0.0
    for losses in (each.losses for each in alone):
        for name, values in losses.items():
            moved(f"{name} loss", together.losses[name][0], together.losses[name][-1])
            pairs = zip(values, together.losses[name], strict=True)
            drift = max(drift, *(abs(one - other) for one, other in pairs))
    seconds = sum(each.seconds for each in alone)
    print(f"one after the other {seconds:.1f} s, both at once {together.seconds:.1f} s")
    print(f"largest difference between alone and together: {drift:.6f}")
    if drift > TOLERANCE:
        raise SystemExit(f"Error: the losses differ by more than {TOLERANCE}: this is a bug")


if __name__ == "__main__":
    start(main)
