"""Fixtures: a server with a trained run, and a CLI with a toy tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.integration.conftest import BASE_MODEL, HELLO, KEY, TIMEOUT_SECONDS, Connect, Serve
from tests.support.byte_tokenizer_cli import context_for
from tinkex import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient
from tinkex.cli.context import Context
from tinkex.testing import StubServer

NUM_STEPS = 5


class Trained(NamedTuple):
    """A server with a training run."""

    server: StubServer
    service: ServiceClient
    training: TrainingClient
    path: str
    context: Context

    @property
    def run_id(self) -> str:
        return self.training.model_id

    def train(self, num_steps: int = 1) -> None:
        """Train some more steps."""
        weights = [1.0] * (len(HELLO) - 1)
        inputs = {"target_tokens": HELLO[1:], "weights": weights}
        datum = Datum(model_input=ModelInput.from_ints(HELLO[:-1]), loss_fn_inputs=inputs)
        for _ in range(num_steps):
            self.training.forward_backward([datum], "cross_entropy").result(TIMEOUT_SECONDS)
            self.training.optim_step(AdamParams(learning_rate=0.5)).result(TIMEOUT_SECONDS)


MakeTrained = Callable[..., Trained]


def train_run(server: StubServer, service: ServiceClient) -> Trained:
    """Train a run and save its weights."""
    training = service.create_lora_training_client(BASE_MODEL, rank=4)
    found = Trained(server, service, training, "", context_for(server.url))
    found.train(NUM_STEPS)
    path = training.save_weights_for_sampler("0001").result(TIMEOUT_SECONDS).path
    return found._replace(path=path)


@pytest.fixture
def trained(serve: Serve, connect: Connect) -> Trained:
    """A server of this test, with a run that may continue."""
    server = serve(api_keys={KEY})
    return train_run(server, connect(server))


@pytest.fixture(scope="package")
def finished() -> Iterator[Trained]:
    """A server for all tests, with a finished run."""
    with StubServer(api_keys={KEY}) as server:
        with ServiceClient(base_url=server.url, api_key=KEY) as service:
            run = train_run(server, service)
        yield run
