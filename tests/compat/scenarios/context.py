"""What the scenarios share: one service, one trained model, and feature detection."""

from __future__ import annotations

import inspect
import urllib.request
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tinker
from tinker import types

from tests.compat.scenario_run import Absent

RANK = 8
#: Any short text serves, as only its loss matters.
TOKENS = [11, 42, 77, 200, 42, 77, 200, 42, 77, 200, 5]
PROMPT = TOKENS[:4]


@dataclass(frozen=True)
class Scenario:
    """One row of the matrix."""

    group: str
    title: str
    run: Callable[[ScenarioContext], None]

    @property
    def name(self) -> str:
        """The name of its function, which is unique."""
        return self.run.__name__


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    group: str, title: str
) -> Callable[[Callable[[ScenarioContext], None]], Callable[[ScenarioContext], None]]:
    """Register a function as a row of the matrix."""

    def register(run: Callable[[ScenarioContext], None]) -> Callable[[ScenarioContext], None]:
        assert run.__name__ not in SCENARIOS, run.__name__
        SCENARIOS[run.__name__] = Scenario(group, title, run)
        return run

    return register


def need(owner: Any, *names: str) -> Any:
    """The first of the attributes that this version has."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise Absent(names[0])


def need_parameter(function: Any, name: str) -> None:
    """Skip the scenario unless the function takes this parameter."""
    if name not in inspect.signature(function).parameters:
        raise Absent(name)


def fields_of(kind: Any) -> set[str]:
    """The fields of a model or a dataclass of the SDK."""
    found = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", {})
    return set(found)


def tensor(values: list[Any], dtype: str) -> Any:
    """A flat tensor."""
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])


def datum(tokens: list[int] = TOKENS, **inputs: list[float]) -> Any:
    """Predict each token from those before it."""
    given = inputs or {"weights": [1.0] * (len(tokens) - 1)}
    floats = {name: tensor(values, "float32") for name, values in given.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tensor(tokens[1:], "int64"), **floats},
    )


def loss_of(client: Any) -> float:
    """The loss of the example, without a gradient."""
    output = client.forward([datum()], "cross_entropy").result()
    return float(output.metrics["loss:sum"])


def step(client: Any) -> float:
    """One optimizer step; returns the loss before it."""
    passed = client.forward_backward([datum()], "cross_entropy")
    moved = client.optim_step(types.AdamParams(learning_rate=0.01))
    moved.result()
    return float(passed.result().metrics["loss:sum"])


def draw(sampler: Any, num_samples: int = 1, **params: Any) -> list[Any]:
    """Sampled sequences for the prompt."""
    asked = types.SamplingParams(**{"max_tokens": 8, "seed": 3, **params})
    prompt = types.ModelInput.from_ints(PROMPT)
    response = sampler.sample(
        prompt=prompt, num_samples=num_samples, sampling_params=asked
    ).result()
    return list(response.sequences)


def ephemeral(client: Any) -> Any:
    """A sampling client of the weights as they are now; early versions want a name."""
    save = client.save_weights_and_get_sampling_client
    name = inspect.signature(save).parameters.get("name")
    return save(name="now") if name is not None and name.default is name.empty else save()


def refusal(call: Callable[[], Any], *kinds: type[Exception]) -> str:
    """The message of the error that the call must raise, which must be of one of these classes."""
    try:
        call()
    except kinds as error:
        return str(error)
    raise AssertionError("the call was accepted")


@dataclass(frozen=True)
class ScenarioContext:
    """A server with a key of its own, and clients that are made when first needed."""

    url: str
    key: str
    other_key: str
    jwt_url: str
    jwt_key: str
    base_model: str
    run: str
    external_key: str
    external_run: str

    @cached_property
    def service(self) -> Any:
        """The service client of all scenarios."""
        return tinker.ServiceClient(base_url=self.url, api_key=self.key)

    @cached_property
    def rest(self) -> Any:
        """The REST client of all scenarios."""
        return self.service.create_rest_client()

    @cached_property
    def client(self) -> Any:
        """A training client that took two steps."""
        client = self.service.create_lora_training_client(base_model=self.base_model, rank=RANK)
        step(client)
        step(client)
        return client

    @cached_property
    def model_id(self) -> str:
        """The id of the client's training run."""
        info = self.client.get_info()
        return str(getattr(info, "model_id", None) or self.client.model_id)

    @cached_property
    def state(self) -> str:
        """The path of a saved training state."""
        return str(self.client.save_state("state").result().path)

    @cached_property
    def weights(self) -> str:
        """The path of saved sampler weights."""
        return str(self.client.save_weights_for_sampler("weights").result().path)

    @cached_property
    def sampler(self) -> Any:
        """A sampling client of the base model."""
        return self.service.create_sampling_client(base_model=self.base_model)

    def spare(self, name: str) -> str:
        """The path of a checkpoint that a scenario may change."""
        return str(self.client.save_state(name).result().path)

    def fetch(self, url: str) -> bytes:
        """GET without a key."""
        with urllib.request.urlopen(url, timeout=30) as response:
            return bytes(response.read())

    def answers(self, endpoint: str) -> float:
        """How often the server answered 200 at an endpoint so far."""
        wanted = f'tinkex_requests_total{{endpoint="{endpoint}",status="200"}} '
        for line in self.fetch(f"{self.url}/metrics").decode().splitlines():
            if line.startswith(wanted):
                return float(line.removeprefix(wanted))
        return 0.0


def quietly(call: Callable[[], Any]) -> Any:
    """Call without the warnings of deprecated or experimental features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()
