"""The loss functions of the protocol, as a value and its slope by each log-probability.

All are sums over all tokens of all examples, and never BLAS sums, whose last bits depend on the
number of threads. In the formulas: t is the model's log-probability of
the target, q the one at sampling time, A the advantage, w the weight, r = exp(t - q).

Shape letters: P pairs of (previous token, next token) of all examples, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from tinkex.engine.fake.bigram import Floats, Tokens
from tinkex.errors import InvalidInput


class Loss(NamedTuple):
    """A loss, and how it changes with each pair's log-probability."""

    value: float
    slope_P: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a loss may look at."""

    logprobs_P: Floats
    inputs: Mapping[str, Floats]
    config: Mapping[str, float | str]
    starts: Tokens
    """Where each example begins."""

    def need(self, name: str) -> Floats:
        """An input by name, or an InvalidInput that says it is missing."""
        if name not in self.inputs:
            raise InvalidInput(f"this loss needs loss_fn_inputs[{name!r}], which is missing")
        return self.inputs[name]

    def number(self, name: str, default: float) -> float:
        """A config value by name."""
        value = self.config.get(name, default)
        if isinstance(value, str):
            raise InvalidInput(f"loss_fn_config[{name!r}] must be a number, got {value!r}")
        return value

    def bounds(self, low: float, high: float) -> tuple[Floats | float, Floats | float]:
        """The clip bounds: per token if given as inputs, else from the config."""
        return (
            self.inputs.get("clip_low_threshold", self.number("clip_low_threshold", low)),
            self.inputs.get("clip_high_threshold", self.number("clip_high_threshold", high)),
        )

    def ratio(self) -> Floats:
        """exp(t - q)."""
        return _exp(self.logprobs_P - self.need("logprobs"))


def cross_entropy(scored: Scored) -> Loss:
    """-sum w t."""
    weights_P = scored.inputs.get("weights")
    if weights_P is None:
        weights_P = np.ones_like(scored.logprobs_P)
    return Loss(-float((weights_P * scored.logprobs_P).sum()), -weights_P)


def importance_sampling(scored: Scored) -> Loss:
    """-sum r A."""
    gain_P = scored.ratio() * scored.need("advantages")
    return Loss(-float(gain_P.sum()), -gain_P)


def ppo(scored: Scored) -> Loss:
    """-sum min(r A, clamp(r) A)."""
    return _clipped(scored, scored.ratio())


def cispo(scored: Scored) -> Loss:
    """-sum stop(clamp(r)) t A; the clamped ratio is a constant."""
    low, high = scored.bounds(0.0, 4.0)
    pull_P = np.clip(scored.ratio(), low, high) * scored.need("advantages")
    return Loss(-float((pull_P * scored.logprobs_P).sum()), -pull_P)


def dro(scored: Scored) -> Loss:
    """-sum (t A - beta/2 (t - q)^2)."""
    beta = scored.number("beta", 0.05)
    advantages_P = scored.need("advantages")
    drift_P = scored.logprobs_P - scored.need("logprobs")
    value = (advantages_P * scored.logprobs_P - 0.5 * beta * drift_P**2).sum()
    return Loss(-float(value), beta * drift_P - advantages_P)


def gspo(scored: Scored) -> Loss:
    """PPO with one ratio per example: exp of its mean t - q, taken where the mask is not 0."""
    drift_P = scored.logprobs_P - scored.need("logprobs")
    mask_P = scored.inputs.get("sequence_ratio_mask", np.ones_like(drift_P)) != 0
    sums = np.add.reduceat(np.where(mask_P, drift_P, 0.0), scored.starts)
    counts = np.add.reduceat(mask_P.astype(np.float64), scored.starts)
    lengths = np.diff(scored.starts, append=len(drift_P))
    return _clipped(scored, np.repeat(_exp(sums / np.maximum(counts, 1.0)), lengths))


def _exp(drift: Floats) -> Floats:
    # A ratio may be infinite here: the loss then is, and whoever asked for it is told.
    with np.errstate(over="ignore"):
        ratio: Floats = np.exp(drift)
    return ratio


def _clipped(scored: Scored, ratio_P: Floats) -> Loss:
    """PPO's objective for given ratios; a ratio's own slope by t is itself."""
    low, high = scored.bounds(0.8, 1.2)
    advantages_P = scored.need("advantages")
    free_P = ratio_P * advantages_P
    held_P = np.clip(ratio_P, low, high) * advantages_P
    return Loss(-float(np.minimum(free_P, held_P).sum()), np.where(free_P <= held_P, -free_P, 0.0))


LossFunction: TypeAlias = Callable[[Scored], Loss]
LOSSES: Mapping[str, LossFunction] = {
    loss.__name__: loss for loss in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo)
}
