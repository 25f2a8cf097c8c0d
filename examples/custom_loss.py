"""A custom loss: teach a model to prefer one answer to another, with a few lines of torch.

    python examples/custom_loss.py                                    # a server inside this process
    python examples/custom_loss.py --base-url https://host --api-key tml-... --base-model NAME

Two ways: a function receives a whole batch, here pairs of answers, and may be any torch code. A
traced loss receives one datum; a server that supports it computes the loss without sending
log-probabilities to the client. Needs torch (pip install tinkex[torch]).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

import tinkex
from tinkex import AdamParams, Datum, ModelInput
from tinkex.testing import StubServer, ToyTokenizer

PROMPT = "is the glass half full? "
GOOD, BAD = "yes, thank you", "no, not at all"


def main() -> int:
    options = parse_options()
    with connect(options) as service:
        prefer(service, options)
        cap_confidence(service, options)
    return 0


def prefer(service: tinkex.ServiceClient, options: argparse.Namespace) -> None:
    """Train on pairs: the loss compares two datums, which no built-in loss does."""
    print("A preference loss over pairs")
    training = service.create_lora_training_client(options.base_model, rank=8, seed=1).result()
    tokenizer = training.get_tokenizer()
    pair = [make_datum(tokenizer, GOOD), make_datum(tokenizer, BAD)]
    step_size = AdamParams(learning_rate=options.learning_rate)
    for step in range(1, options.steps + 1):
        # Send both before waiting for either; the client preserves the order.
        forward_backward = training.forward_backward_custom(pair, preference_loss)
        optim_step = training.optim_step(step_size)
        metrics = forward_backward.result().metrics
        optim_step.result()
        if step == 1 or step % max(1, options.steps // 5) == 0:
            loss, margin = metrics["loss:sum"], metrics["margin:mean"]
            print(f"  step {step:3}   loss {loss:.4f}   margin {margin:+.3f}")


def preference_loss(
    data: list[Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Preference loss; datums alternate between good and bad answers."""
    totals = [
        (datum.loss_fn_inputs["weights"].to_torch() * scores).sum()
        for datum, scores in zip(data, logprobs, strict=True)
    ]
    margins = torch.stack(totals[0::2]) - torch.stack(totals[1::2])
    loss = -torch.nn.functional.logsigmoid(0.1 * margins).sum()
    return loss, {"margin:mean": margins.mean().item()}


def cap_confidence(service: tinkex.ServiceClient, options: argparse.Namespace) -> None:
    """Train with a traced loss: cross entropy without a gradient for likely tokens."""
    print("A traced loss of one datum")
    # Both inputs are vectors: one value per position.
    handle = service.create_custom_loss(
        capped_cross_entropy, {"logprobs": 1, "weights": 1}
    ).result()
    print(f"  runs {'here' if handle.loss_id is None else 'on the server as ' + handle.loss_id}")
    training = service.create_lora_training_client(options.base_model, rank=8, seed=1).result()
    datum = make_datum(training.get_tokenizer(), GOOD)
    for _ in range(options.steps):
        forward_backward = training.forward_backward_custom([datum], handle)
        training.optim_step(AdamParams(learning_rate=options.learning_rate)).result()
    print(
        f"  loss after {options.steps} steps: {forward_backward.result().metrics['loss:sum']:.4f}"
    )


def capped_cross_entropy(
    logprobs: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross entropy that ignores tokens with a probability above about 0.9."""
    return -(weights * torch.clamp(logprobs, max=-0.1)).sum(), {}


def make_datum(tokenizer: Any, answer: str) -> Datum:
    """Build a datum in which only the tokens of the answer have weight."""
    prompt, reply = tokenizer.encode(PROMPT), tokenizer.encode(answer)
    tokens = [*prompt, *reply]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(reply),
        },
    )


@contextlib.contextmanager
def connect(options: argparse.Namespace) -> Iterator[tinkex.ServiceClient]:
    """Connect to the server of --base-url, or to one in this process."""
    if options.base_url:
        with tinkex.ServiceClient(base_url=options.base_url, api_key=options.api_key) as service:
            yield service
        return
    with (
        StubServer(models=(options.base_model,)) as server,
        tinkex.ServiceClient(
            base_url=server.url,
            api_key="tml-example",
            tokenizer_loader=lambda name: ToyTokenizer(),
        ) as service,
    ):
        yield service


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", help="server to use; default: one in this process")
    parser.add_argument("--api-key", help="key for that server; default: TINKER_API_KEY")
    parser.add_argument("--base-model", default="tinkex/bigram", help="model to train on")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each part")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except tinkex.TinkexError as error:
        sys.exit(f"Error: {error}\n{error.hint or ''}".rstrip())
