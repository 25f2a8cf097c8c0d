"""Where the examples train: on a server you name, or on a small one inside their own process."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import tinkex
from tinkex.testing import StubServer, ToyTokenizer


@contextlib.contextmanager
def training_client(about: str, num_steps: int) -> Iterator[tuple[tinkex.TrainingClient, int]]:
    """A client as the command line says, and how many steps to take."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--base-url", help="server to use; default: one in this process")
    parser.add_argument("--api-key", default="tml-example", help="key for that server")
    parser.add_argument("--base-model", default="tinkex/bigram", help="model to train on")
    parser.add_argument("--steps", type=int, default=num_steps)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url, loader = options.base_url, None
        if not url:
            url = stack.enter_context(StubServer(models=(options.base_model,))).url
            loader = _toy_tokenizer
        service = stack.enter_context(
            tinkex.ServiceClient(base_url=url, api_key=options.api_key, tokenizer_loader=loader)
        )
        yield service.create_lora_training_client(options.base_model, rank=8, seed=0), options.steps


def _toy_tokenizer(name: str) -> ToyTokenizer:
    return ToyTokenizer()
