"""Recipes with regularizers: base losses in torch, and reference log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tinkex.client.custom_loss import CustomLossFnV1
from tinkex.client.loss_graph import load_torch
from tinkex.client.sampling import SamplingClient
from tinkex.recipes.plan import RlLoss
from tinkex.regularizers.base import Regularizer
from tinkex.types import Datum, ForwardBackwardOutput, ModelInput, TensorData

#: The server's default clip thresholds of ppo and cispo.
CLIP_LOW, CLIP_HIGH = 0.8, 1.2


def cross_entropy(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    """-sum w t."""
    return -sum((_read(d, "weights") * t).sum() for d, t in zip(data, logprobs, strict=True)), {}


def policy_loss(loss: RlLoss) -> CustomLossFnV1:
    """Return importance_sampling, ppo or cispo as the server computes them by default."""

    def compute(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        terms = [
            _policy_term(loss, t, _read(datum, "logprobs"), _read(datum, "advantages"))
            for datum, t in zip(data, logprobs, strict=True)
        ]
        return -sum(terms), {}

    return compute


def _policy_term(loss: RlLoss, t: Any, q: Any, advantages: Any) -> Any:
    torch = load_torch()
    # Where the advantage is 0, q is a placeholder.
    ratio = torch.where(advantages != 0.0, t - q, 0.0).exp()
    clipped = ratio.clamp(CLIP_LOW, CLIP_HIGH)
    if loss == "cispo":
        return (clipped.detach() * t * advantages).sum()
    if loss == "ppo":
        return torch.minimum(ratio * advantages, clipped * advantages).sum()
    return (ratio * advantages).sum()


def preference_loss(reference: Sequence[tuple[float, float]], beta: float) -> CustomLossFnV1:
    """Return the mean DPO loss of datums that alternate between chosen and rejected answers."""

    def compute(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        torch = load_torch()
        sums = [(_read(d, "weights") * t).sum() for d, t in zip(data, logprobs, strict=True)]
        gaps = torch.stack(sums[0::2]) - torch.stack(sums[1::2])
        margins = beta * (
            gaps - torch.tensor([chosen - rejected for chosen, rejected in reference])
        )
        return -torch.nn.functional.logsigmoid(margins).mean(), {}

    return compute


def find_reference_inputs(regularizers: Sequence[Regularizer]) -> set[str]:
    """Return the inputs of reference log-probabilities that the regularizers read."""
    return {term.reference_input for term in regularizers if term.reference_input is not None}


def add_reference(
    data: Sequence[Datum], sampler: SamplingClient, input_names: set[str]
) -> list[Datum]:
    """Add the log-probabilities of the targets under the reference to each datum."""
    futures = []
    for datum in data:
        last = datum.loss_fn_inputs["target_tokens"].tolist()[-1]
        tokens = [*datum.model_input.to_ints(), last]
        futures.append(sampler.compute_logprobs(ModelInput.from_ints(tokens)))
    return [
        with_reference(datum, [score or 0.0 for score in future.result()[1:]], input_names)
        for datum, future in zip(data, futures, strict=True)
    ]


def with_reference(datum: Datum, scores: Sequence[float], input_names: set[str]) -> Datum:
    """Return the datum with reference log-probabilities."""
    tensor = TensorData(list(scores), "float32", [len(scores)])
    added = dict.fromkeys(input_names, tensor)
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, **added})


def regularizer_metrics(output: ForwardBackwardOutput) -> Mapping[str, float]:
    """Select the metrics of regularizers."""
    return select_metrics(output.metrics)


def select_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Select the base loss and the metrics of regularizers."""
    prefixes = ("base_loss", "regularizer/")
    return {name: value for name, value in metrics.items() if name.startswith(prefixes)}


def _read(datum: Datum, key: str) -> Any:
    return datum.loss_fn_inputs[key].to_torch()
