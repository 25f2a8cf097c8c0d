"""Train two adapters at once in one asyncio program, and see where the time goes.

    python examples/async_training.py                                 # a server inside this process
    python examples/async_training.py --base-url https://host --api-key tml-... --base-model NAME

Each loop stays one step ahead: it sends the next batch before it reads the last loss, so the
server is never idle. Calls reach the server in the order they were made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any

import tinkex
from tinkex import AdamParams, APIFuture, Datum, ForwardBackwardOutput, ModelInput
from tinkex.testing import StubServer, ToyTokenizer

TEXTS = {
    "animals": "the cat sat on the mat. the dog sat on the log. ",
    "advice": "a small step every day takes you far. begin now, carry on. ",
}


async def main() -> int:
    options = parse_options()
    slowest: Counter[str] = Counter()

    def note(event: object) -> None:
        """Called with every Timing, RequestDone and QueueChanged, on a separate thread."""
        if isinstance(event, tinkex.Timing):
            slowest[event.operation] = max(slowest[event.operation], round(1000 * event.seconds))

    async with connect(options, note) as service:
        runs = [train(service, name, text, options) for name, text in TEXTS.items()]
        for name, losses in zip(TEXTS, await asyncio.gather(*runs), strict=True):
            print(f"{name:8} loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    for operation, milliseconds in slowest.most_common():
        print(f"slowest {operation}: {milliseconds} ms")
    return 0


async def train(
    service: tinkex.ServiceClient, name: str, text: str, options: argparse.Namespace
) -> list[float]:
    """Train one adapter, save its weights under its name and return the losses."""
    training = await service.create_lora_training_client_async(options.base_model, rank=8, seed=1)
    tokenizer = await asyncio.to_thread(training.get_tokenizer)
    datum = make_datum(tokenizer.encode(text))
    adam = AdamParams(learning_rate=options.learning_rate)
    losses: list[float] = []
    sent: deque[APIFuture[ForwardBackwardOutput]] = deque()
    for _ in range(options.steps):
        # These return as soon as the calls are queued in order; they do not wait for results.
        sent.append(training.forward_backward([datum], "cross_entropy"))
        optim_step = training.optim_step(adam)
        if len(sent) > 1:
            losses.append(loss_of(await sent.popleft(), datum))
    losses.append(loss_of(await sent.popleft(), datum))
    await optim_step
    saved = await training.save_state_async(name)
    print(f"saved {(await saved).path}")
    return losses


def loss_of(output: ForwardBackwardOutput, datum: Datum) -> float:
    return output.metrics["loss:sum"] / datum.model_input.length


def make_datum(tokens: list[int]) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


@contextlib.asynccontextmanager
async def connect(options: argparse.Namespace, note: Any) -> AsyncIterator[tinkex.ServiceClient]:
    """Connect to the server of --base-url, or to one in this process."""
    with contextlib.ExitStack() as stack:
        base_url, api_key, loader = options.base_url, options.api_key, None
        if base_url is None:
            base_url = stack.enter_context(StubServer(models=(options.base_model,))).url
            api_key, loader = "tml-example", lambda name: ToyTokenizer()
        async with tinkex.ServiceClient(
            base_url=base_url, api_key=api_key, tokenizer_loader=loader, event_hook=note
        ) as service:
            yield service


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", help="server to use; default: one in this process")
    parser.add_argument("--api-key", help="key for that server; default: TINKER_API_KEY")
    parser.add_argument("--base-model", default="tinkex/bigram", help="model to train on")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except tinkex.TinkexError as error:
        sys.exit(f"Error: {error}\n{error.hint or ''}".rstrip())
