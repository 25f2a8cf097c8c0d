"""Regularizers that are sums over targets: L1, L2, elastic net, entropy and KL divergence.

In the formulas, t is the log-probability of a selected target, p = exp(t) its probability, q its
log-probability under the reference. Sums are divided by the number of token positions that have a
selected target, unless `reduction` is "sum".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tinkex.client.loss_graph import load_torch
from tinkex.regularizers.base import LossBatch, Reduction, Regularizer, check_choice
from tinkex.types.optimizers import check_range

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Elementwise(Regularizer):
    """A regularizer that sums a term over the selected targets."""

    reduction: Reduction = "mean"
    """Mean over token positions, or sum."""

    def __post_init__(self) -> None:
        # super() without arguments does not work in a dataclass with slots.
        Regularizer.__post_init__(self)
        check_choice("reduction", self.reduction, ("mean", "sum"))

    def reduce(self, terms: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Sum the terms, and divide them by the number of positions unless they are summed."""
        return terms.sum() if self.reduction == "sum" else terms.sum() / batch.num_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm(_Elementwise):
    """A norm of log-probabilities, or of their differences from a reference."""

    reference: str | None = None
    """Input with log-probabilities that are subtracted; None subtracts nothing."""

    @property
    def reference_input(self) -> str | None:
        """The input that is subtracted."""
        return self.reference

    def values(self, batch: LossBatch) -> torch.Tensor:
        """Return t, or t - q."""
        if self.reference is None:
            return batch.logprobs
        result: torch.Tensor = batch.logprobs - load_torch().cat(batch.read_input(self.reference))
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class L1(_Norm):
    """Sum of |t|, or of |t - q| with a reference."""

    kind: ClassVar[str] = "l1"

    def penalty(self, batch: LossBatch) -> torch.Tensor:
        """Compute the penalty."""
        return self.reduce(self.values(batch).abs(), batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class L2(_Norm):
    """Sum of t^2, or of (t - q)^2 with a reference."""

    kind: ClassVar[str] = "l2"

    def penalty(self, batch: LossBatch) -> torch.Tensor:
        """Compute the penalty."""
        return self.reduce(self.values(batch).square(), batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticNet(_Norm):
    """l1_ratio * L1 + (1 - l1_ratio) / 2 * L2, as in scikit-learn."""

    kind: ClassVar[str] = "elastic_net"

    l1_ratio: float = 0.5
    """Share of L1, from 0 to 1."""

    def __post_init__(self) -> None:
        _Elementwise.__post_init__(self)
        check_range("l1_ratio", self.l1_ratio, at_least=0.0, at_most=1.0)

    def penalty(self, batch: LossBatch) -> torch.Tensor:
        """Compute the penalty."""
        values = self.values(batch)
        terms = self.l1_ratio * values.abs() + (1.0 - self.l1_ratio) / 2.0 * values.square()
        return self.reduce(terms, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entropy(_Elementwise):
    """H = sum of -p t; the entropy of the model if the targets are its whole vocabulary.

    With one target per position it is the share of that target in the entropy.
    """

    kind: ClassVar[str] = "entropy"

    goal: Literal["maximize", "minimize"] = "maximize"
    """The penalty is -H to maximize the entropy, and H to minimize it."""

    def __post_init__(self) -> None:
        _Elementwise.__post_init__(self)
        check_choice("goal", self.goal, ("maximize", "minimize"))

    def penalty(self, batch: LossBatch) -> torch.Tensor:
        """Compute the penalty."""
        negative_entropy = self.reduce(batch.logprobs.exp() * batch.logprobs, batch)
        return negative_entropy if self.goal == "maximize" else -negative_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class KLDivergence(_Elementwise):
    """KL divergence between the model and a reference; never negative, 0 where they are equal.

    Summed, "reverse" is p (t - q) - p + exp(q), KL(model || reference), and "forward" is
    exp(q) (q - t) - exp(q) + p, KL(reference || model): exact if the targets are the whole
    vocabulary. Sampled, the term is divided by p or exp(q): the k3 estimator, for targets that
    were drawn from the model ("reverse") or from the reference ("forward").
    """

    kind: ClassVar[str] = "kl"

    direction: Literal["forward", "reverse"] = "reverse"
    """"reverse" is KL(model || reference), "forward" is KL(reference || model)."""
    estimator: Literal["sampled", "summed"] = "sampled"
    """Whether targets are samples, or alternatives to sum over."""
    reference: str = "reference_logprobs"
    """Input with the log-probabilities of the targets under the reference."""

    def __post_init__(self) -> None:
        _Elementwise.__post_init__(self)
        check_choice("direction", self.direction, ("forward", "reverse"))
        check_choice("estimator", self.estimator, ("sampled", "summed"))

    @property
    def label(self) -> str:
        """The name in the metrics; it has the direction."""
        return self.name or f"kl_{self.direction}"

    @property
    def reference_input(self) -> str | None:
        """The input with the reference."""
        return self.reference

    def penalty(self, batch: LossBatch) -> torch.Tensor:
        """Compute the penalty."""
        reference = load_torch().cat(batch.read_input(self.reference))
        is_reverse = self.direction == "reverse"
        first, second = (batch.logprobs, reference) if is_reverse else (reference, batch.logprobs)
        log_ratio = second - first
        # expm1 keeps the digits of small differences.
        terms = log_ratio.expm1() - log_ratio
        return self.reduce(terms if self.estimator == "sampled" else first.exp() * terms, batch)
