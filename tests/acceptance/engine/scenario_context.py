"""The context of a scenario, and helpers for the official SDK."""

from __future__ import annotations

import traceback
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

BASE_MODEL = "tiny"
Scenario: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioContext:
    """A server, tenants, model folders and a directory for one scenario."""

    url: str
    keys: tuple[str, ...]
    folders: Mapping[str, Path]
    directory: Path


class ScenarioResult(NamedTuple):
    """The traceback of a scenario, or its result."""

    failure_text: str
    result: Any = None


def run_scenario(scenario: Scenario, context: ScenarioContext, *args: Any) -> ScenarioResult:
    """Run a scenario in this process."""
    try:
        return ScenarioResult("", scenario(context, *args))
    except Exception:  # noqa: BLE001 - not every error can be sent to another process
        return ScenarioResult(traceback.format_exc())


def connect(context: ScenarioContext, tenant: int = 0) -> Any:
    """A service client of one of the tenants."""
    import tinker

    return tinker.ServiceClient(base_url=context.url, api_key=context.keys[tenant])


def text(seed: int, length: int) -> list[int]:
    """Random tokens, none of them special."""
    tokens: list[int] = np.random.default_rng(seed).integers(3, 259, length).tolist()
    return tokens


def prompt_of(tokens: Sequence[int]) -> Any:
    """Tokens as a prompt."""
    import tinker

    return tinker.ModelInput.from_ints(list(tokens))


def example(prompt: Sequence[int], answer: Sequence[int], **inputs: Any) -> Any:
    """A training example for an answer; `inputs` are for the answer, the prompt gets zeros."""
    import tinker

    tokens = [*prompt, *answer]
    zeros = [0.0] * (len(prompt) - 1)
    given = inputs or {"weights": [1.0] * len(answer)}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            **{name: [*zeros, *map(float, values)] for name, values in given.items()},
        },
    )


def step(
    client: Any, data: Sequence[Any], loss_fn: str = "cross_entropy", **adam: float
) -> tuple[dict[str, float], dict[str, float]]:
    """One training step; returns the metrics of the pass and of the optimizer."""
    import tinker

    passed = client.forward_backward(list(data), loss_fn)
    moved = client.optim_step(tinker.AdamParams(**{"learning_rate": 1e-2, **adam}))
    return dict(passed.result().metrics), dict(moved.result().metrics)


def logprobs_of(client: Any, data: Sequence[Any]) -> list[npt.NDArray[np.float32]]:
    """The trainer's log-probabilities of each example's targets."""
    output = client.forward(list(data), "cross_entropy").result()
    return [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]


def fetch_adapter(
    context: ScenarioContext, client: Any, name: str, tenant: int = 0
) -> dict[str, bytes]:
    """Download the files of a PEFT adapter."""
    import tinker

    rest = tinker.RestClient(base_url=context.url, api_key=context.keys[tenant])
    path = client.save_weights_external(name).result().path
    urls = rest.get_external_weights_urls(path).result().urls
    return {file: fetch(url) for file, url in urls.items()}


def fetch(url: str) -> bytes:
    """GET without an API key: the signed URL is enough."""
    with urllib.request.urlopen(url, timeout=30) as response:
        content: bytes = response.read()
    return content


def weights_of(files: Mapping[str, bytes]) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors of a downloaded adapter."""
    from safetensors.numpy import load

    tensors: dict[str, npt.NDArray[np.float32]] = load(files["adapter_model.safetensors"])
    return tensors


def max_difference(
    mine: Mapping[str, npt.NDArray[np.float32]], other: Mapping[str, npt.NDArray[np.float32]]
) -> float:
    """The largest difference between two adapters of the same shape."""
    assert mine.keys() == other.keys()
    return max(float(np.abs(mine[name] - other[name]).max()) for name in mine)


def error_text(call: Callable[[], Any]) -> str:
    """The one-line error of a call that fails because of the user."""
    import tinker

    try:
        call()
    except tinker.RequestFailedError as error:
        assert error.category.value == "user", error
        message = str(error)
    except tinker.APIStatusError as error:
        assert 400 <= error.status_code < 500, error
        message = str(error)
    else:
        raise AssertionError("the call did not fail")
    assert "Traceback" not in message and "\n" not in message.strip(), message
    return message
