"""The loss functions of the API, and their gradients by the log-probabilities of the targets.

All are sums over all tokens of all examples. They avoid BLAS sums, whose last bits depend on the
number of threads. In the formulas: t is the model's log-probability of the target, q the one at
sampling time, A the advantage, w the weight, r = exp(t - q); stop(x) is x without a gradient, and
clamp(x) limits x to the clip thresholds.

Shape letters: P pairs of (token position, target) of all examples, concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tinkex.engine.custom_losses.graphs import UploadedLoss, find_loss
from tinkex.errors import InvalidInput
from tinkex.types import ForwardBackwardInput

Floats: TypeAlias = npt.NDArray[np.float64]
Offsets: TypeAlias = npt.NDArray[np.int64]

_NO_METRICS: Mapping[str, float] = MappingProxyType({})
#: Models compute in float32 at most, so a larger gradient cannot be backpropagated.
_FLOAT32_MAX = float(np.finfo(np.float32).max)

#: 1 for targets that were sampled, else 0; clients cannot send it.
SAMPLED_INPUT = "is_sampled"
#: stable_reinforce continues its KL penalty as a line beyond this log-ratio.
_MAX_KL_LOG_RATIO = math.log(10.0)

#: The loss that `loss_fn_config["loss_id"]` contains; see `custom_losses`.
CUSTOM = "custom"


class LossValue(NamedTuple):
    """A loss, and its gradient by each pair's log-probability."""

    value: float
    grad_P: Floats
    metrics: Mapping[str, float] = _NO_METRICS
    """Additional metrics, named `name:mean` or `name:sum`; see `num_counted`."""
    num_counted: int = 0
    """What the means cover: pairs with a nonzero advantage, sampled ones, or examples."""
    error: str = ""
    """Why an uploaded loss could not be computed; then the pass fails and has no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """The arguments of a loss; `LossFunction` lists its inputs and settings."""

    logprobs_P: Floats
    inputs: Mapping[str, Floats]
    settings: Mapping[str, float]
    example_starts: Offsets
    """The index of each example's first pair."""

    def clip_bounds(self) -> tuple[Floats | float, Floats | float]:
        """The clip thresholds: per pair if given as inputs, else from the settings."""
        low, high = (
            self.inputs.get(name, self.settings[name])
            for name in ("clip_low_threshold", "clip_high_threshold")
        )
        return low, high

    def ratio_P(self) -> Floats:
        """r, or 1 where the advantage is 0: there r has no effect, and q is often a placeholder."""
        log_ratio_P = self.logprobs_P - self.inputs["logprobs"]
        return _exp_ratio(np.where(self.inputs["advantages"] != 0.0, log_ratio_P, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFunction:
    """A loss and its inputs, which have the shape of the targets."""

    name: str
    compute: Callable[[ScoredTokens], LossValue]
    required_inputs: tuple[str, ...] = ()
    """Inputs that every example must have."""
    optional_inputs: tuple[str, ...] = ()
    """Inputs that any example may have; others then use a default."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """The keys of `loss_fn_config`, with their defaults."""
    is_linear: bool = False
    """Whether the gradient does not depend on the log-probabilities."""
    uses_provenance: bool = False
    """Whether the loss also reads `SAMPLED_INPUT`, which is derived from provenance spans."""


def cross_entropy(scored: ScoredTokens) -> LossValue:
    """-sum w t, with w = 1 if there are no weights."""
    weights_P = scored.inputs.get("weights")
    if weights_P is None:
        weights_P = np.ones_like(scored.logprobs_P)
    return LossValue(-float((weights_P * scored.logprobs_P).sum()), -weights_P)


def importance_sampling(scored: ScoredTokens) -> LossValue:
    """-sum r A; the derivative of r by t is r."""
    ratio_P, advantages_P = scored.ratio_P(), scored.inputs["advantages"]
    gain_P = ratio_P * advantages_P
    return _with_metrics(-float(gain_P.sum()), -gain_P, advantages_P, ratio=ratio_P)


def ppo(scored: ScoredTokens) -> LossValue:
    """-sum min(r A, clamp(r) A)."""
    return _clipped_loss(scored, scored.ratio_P())


def cispo(scored: ScoredTokens) -> LossValue:
    """-sum stop(clamp(r)) t A."""
    ratio_P, advantages_P = scored.ratio_P(), scored.inputs["advantages"]
    low, high = scored.clip_bounds()
    weighted_P = np.clip(ratio_P, low, high) * advantages_P
    value = -float((weighted_P * scored.logprobs_P).sum())
    is_clipped_P = (ratio_P < low) | (ratio_P > high)
    return _with_metrics(
        value, -weighted_P, advantages_P, ratio=ratio_P, clip_fraction=is_clipped_P
    )


def dro(scored: ScoredTokens) -> LossValue:
    """-sum (t A - beta/2 (t - q)^2)."""
    beta, advantages_P = scored.settings["beta"], scored.inputs["advantages"]
    log_ratio_P = scored.logprobs_P - scored.inputs["logprobs"]
    value = (advantages_P * scored.logprobs_P - 0.5 * beta * log_ratio_P**2).sum()
    return LossValue(-float(value), beta * log_ratio_P - advantages_P)


def gspo(scored: ScoredTokens) -> LossValue:
    """-sum min(s A, clamp(s) A), with s = exp(L + t - stop(t)) and one L per example.

    L is the example's mean of stop(t) - q where sequence_ratio_mask is not 0; without a mask it is
    the mean of all, and with a mask of zeros it is 0.
    """
    log_ratio_P = scored.logprobs_P - scored.inputs["logprobs"]
    mask_P = scored.inputs.get("sequence_ratio_mask", np.ones_like(log_ratio_P)) != 0
    sums = np.add.reduceat(np.where(mask_P, log_ratio_P, 0.0), scored.example_starts)
    counts = np.add.reduceat(mask_P.astype(np.float64), scored.example_starts)
    lengths = np.diff(scored.example_starts, append=len(log_ratio_P))
    ratio_P = np.repeat(_exp_ratio(sums / np.maximum(counts, 1.0)), lengths)
    return _clipped_loss(scored, np.where(scored.inputs["advantages"] != 0.0, ratio_P, 1.0))


def stable_reinforce(scored: ScoredTokens) -> LossValue:
    """sum m (-stop(min(r, 1)) A t + kl_coeff k(t - q)), with m = 1 for sampled targets, else 0.

    k(d) = exp(d) - 1 - d estimates the KL divergence from the sampler; it is linear beyond ln 10,
    so that no difference between sampler and trainer overflows.
    """
    kl_coeff, advantages_P = scored.settings["kl_coeff"], scored.inputs["advantages"]
    sampled_P = scored.inputs[SAMPLED_INPUT]
    log_ratio_P = np.where(sampled_P != 0.0, scored.logprobs_P - scored.inputs["logprobs"], 0.0)
    near_P = np.minimum(log_ratio_P, _MAX_KL_LOG_RATIO)
    excess_P, slope_P = log_ratio_P - near_P, np.expm1(near_P)
    kl_P = slope_P - near_P + slope_P * excess_P
    policy_P = sampled_P * np.exp(np.minimum(log_ratio_P, 0.0)) * advantages_P
    value = float((kl_coeff * kl_P - policy_P * scored.logprobs_P).sum())
    return _with_metrics(
        value,
        kl_coeff * slope_P - policy_P,
        sampled_P,
        ratio=_exp_ratio(log_ratio_P),
        kl=kl_P,
        truncated_fraction=log_ratio_P > 0.0,
    )


def _exp_ratio(log_ratio: Floats) -> Floats:
    # An infinite ratio makes the loss infinite, which is reported to the client.
    with np.errstate(over="ignore"):
        ratio: Floats = np.exp(log_ratio)
    return ratio


def _clipped_loss(scored: ScoredTokens, ratio_P: Floats) -> LossValue:
    """PPO's objective for given ratios; the gradient is 0 where clipping takes effect."""
    low, high = scored.clip_bounds()
    advantages_P = scored.inputs["advantages"]
    unclipped_P = ratio_P * advantages_P
    clipped_P = np.clip(ratio_P, low, high) * advantages_P
    is_clipped_P = unclipped_P > clipped_P
    value = -float(np.minimum(unclipped_P, clipped_P).sum())
    grad_P = np.where(is_clipped_P, 0.0, -unclipped_P)
    return _with_metrics(value, grad_P, advantages_P, ratio=ratio_P, clip_fraction=is_clipped_P)


def _with_metrics(
    value: float, grad_P: Floats, counted_P: Floats, **reported: Floats | npt.NDArray[np.bool_]
) -> LossValue:
    """Add the means of the reported values, over the pairs whose `counted_P` is not 0."""
    is_counted_P = counted_P != 0.0
    num_counted = int(np.count_nonzero(is_counted_P))
    # If no pair counts, average over all: their ratios are 1.
    which = is_counted_P if num_counted else slice(None)
    # Never infinite: not every wire format has a representation for it.
    means = {
        name: min(float(each_P[which].mean()), _FLOAT32_MAX) for name, each_P in reported.items()
    }
    metrics = {f"{name}:mean": mean for name, mean in means.items()}
    return LossValue(value, grad_P, metrics, num_counted)


_RATIO_INPUTS = ("logprobs", "advantages")
_CLIP_INPUTS = ("clip_low_threshold", "clip_high_threshold")
LOSSES: Mapping[str, LossFunction] = {
    loss.name: loss
    for loss in (
        LossFunction(
            name="cross_entropy",
            compute=cross_entropy,
            optional_inputs=("weights",),
            is_linear=True,
        ),
        LossFunction(
            name="importance_sampling", compute=importance_sampling, required_inputs=_RATIO_INPUTS
        ),
        LossFunction(
            name="ppo",
            compute=ppo,
            required_inputs=_RATIO_INPUTS,
            optional_inputs=_CLIP_INPUTS,
            settings={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        ),
        LossFunction(
            name="cispo",
            compute=cispo,
            required_inputs=_RATIO_INPUTS,
            optional_inputs=_CLIP_INPUTS,
            settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        ),
        LossFunction(
            name="dro", compute=dro, required_inputs=_RATIO_INPUTS, settings={"beta": 0.05}
        ),
        LossFunction(
            name="gspo",
            compute=gspo,
            required_inputs=_RATIO_INPUTS,
            optional_inputs=(*_CLIP_INPUTS, "sequence_ratio_mask"),
            settings={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        ),
        LossFunction(
            name="stable_reinforce",
            compute=stable_reinforce,
            required_inputs=_RATIO_INPUTS,
            settings={"kl_coeff": 0.01},
            uses_provenance=True,
        ),
    )
}


def get_loss(name: str) -> LossFunction:
    """Look up a built-in loss; raises InvalidInput for unknown names."""
    loss = LOSSES.get(name)
    if loss is None:
        raise InvalidInput(f"loss_fn {name!r} is not one of {', '.join((*LOSSES, CUSTOM))}")
    return loss


def find_custom_loss(request: ForwardBackwardInput) -> UploadedLoss | None:
    """The uploaded loss of a request, if it has one; raises InvalidInput for an invalid id."""
    if request.loss_fn != CUSTOM:
        return None
    config = request.loss_fn_config or {}
    loss_id = config.get("loss_id")
    if not isinstance(loss_id, str) or len(config) != 1:
        raise InvalidInput(
            "loss_fn 'custom' takes one setting, the loss_id of create_custom_loss; for other "
            "losses use forward_backward_custom, which computes them in the client"
        )
    return find_loss(loss_id)


def is_linear(name: str) -> bool:
    """Whether the gradient of a loss does not depend on the log-probabilities."""
    return name != CUSTOM and get_loss(name).is_linear


def parse_loss_config(request: ForwardBackwardInput) -> Mapping[str, float]:
    """All settings of the request's loss; raises InvalidInput for the first wrong one."""
    loss = get_loss(request.loss_fn)
    given = request.loss_fn_config or {}
    for name, value in given.items():
        if name not in loss.settings:
            known = ", ".join(loss.settings) or "no settings"
            raise InvalidInput(f"loss_fn_config has {name!r}, but {loss.name} takes {known}")
        if not isinstance(value, float | int) or not math.isfinite(value):
            raise InvalidInput(f"loss_fn_config[{name!r}] must be a finite number, got {value!r}")
    return {name: float(given.get(name, value)) for name, value in loss.settings.items()}


class _HasInputs(Protocol):
    @property
    def inputs(self) -> Mapping[str, Floats]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def compute_loss(
    request: ForwardBackwardInput,
    examples: Sequence[_HasInputs],
    logprobs: Sequence[npt.NDArray[np.floating]],
) -> LossValue:
    """The loss of some of a request's examples, given the log-probabilities of their targets.

    Losses are sums over examples, so the losses of parts can be added; see `sum_metrics`. The
    gradient has the order of the examples.
    """
    custom = find_custom_loss(request)
    if not examples:
        return LossValue(0.0, np.empty(0))
    if custom is not None:
        return _compute_custom(custom, examples, logprobs)
    loss = get_loss(request.loss_fn)
    sizes = [each.size for each in logprobs]
    scored = ScoredTokens(
        logprobs_P=np.concatenate([each.ravel() for each in logprobs]).astype(np.float64),
        inputs={
            name: np.concatenate([example.inputs[name] for example in examples])
            for name in examples[0].inputs
        },
        settings=parse_loss_config(request),
        example_starts=np.cumsum([0, *sizes[:-1]]),
    )
    # `check_loss` reports non-finite values, so NumPy need not warn about them.
    with np.errstate(all="ignore"):
        return loss.compute(scored)


def _compute_custom(
    loss: UploadedLoss,
    examples: Sequence[_HasInputs],
    logprobs: Sequence[npt.NDArray[np.floating]],
) -> LossValue:
    """The sum of an uploaded loss over examples, one by one, and the sums or means of its metrics.

    An example's loss does not depend on the others, so it is the same in any micro-batch.
    """
    try:
        results = [
            loss.compute(each.astype(np.float64).reshape(example.shape), example.inputs)
            for example, each in zip(examples, logprobs, strict=True)
        ]
    except InvalidInput as error:
        # Not raised: passes of other tenants in this micro-batch must not run again.
        return LossValue(0.0, np.zeros(sum(each.size for each in logprobs)), error=error.message)
    metrics = {}
    for name in results[0].metrics:
        total = sum(result.metrics[name] for result in results)
        value = total / len(results) if name.endswith(":mean") else total
        metrics[name] = min(max(value, -_FLOAT32_MAX), _FLOAT32_MAX)
    return LossValue(
        sum(result.value for result in results),
        np.concatenate([result.grad.ravel() for result in results]),
        metrics,
        len(results),
    )


def check_loss(name: str, loss: LossValue) -> None:
    """Raise InvalidInput if the loss could not be computed, or it or its gradient is not finite."""
    if loss.error:
        raise InvalidInput(loss.error)
    if not math.isfinite(loss.value):
        raise InvalidInput(f"the {name} loss is {loss.value}; check its inputs")
    largest = float(np.abs(loss.grad_P).max(initial=0.0))
    if not largest <= _FLOAT32_MAX:
        raise InvalidInput(
            f"the gradient is not finite: the {name} loss changes by {largest:g} per "
            "log-probability; scale the loss inputs down"
        )


def sum_metrics(losses: Sequence[LossValue]) -> dict[str, float]:
    """The metrics of a request, from the losses of its micro-batches."""
    num_counted = sum(loss.num_counted for loss in losses)
    metrics = {"loss:sum": sum(loss.value for loss in losses)}
    for name in losses[0].metrics if losses else ():
        if name.endswith(":sum"):
            metrics[name] = sum(loss.metrics[name] for loss in losses)
            continue
        total = sum(loss.metrics[name] * loss.num_counted for loss in losses)
        metrics[name] = total / num_counted if num_counted else losses[0].metrics[name]
    return metrics
