"""Regularizers of whole datums: consistency, orthogonality and the gradient penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tinkex.client.loss_graph import load_torch
from tinkex.errors import InvalidInput
from tinkex.regularizers.base import LossBatch, Regularizer, check_choice
from tinkex.types.optimizers import check_range

if TYPE_CHECKING:
    import torch

#: Orthogonality compares every datum with every other.
MAX_ORTHOGONAL_DATUMS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Consistency(Regularizer):
    """Mean distance of the log-probabilities of pairs of datums, which alternate in the batch.

    A pair is one answer in two contexts, such as a prompt and its paraphrase, so both have the
    same number of selected targets. With a reference, each datum is compared with that instead.
    """

    kind: ClassVar[str] = "consistency"

    distance: Literal["squared", "absolute", "cosine"] = "squared"
    """Mean squared or absolute difference, or 1 - cosine similarity."""
    reference: str | None = None
    """Input with the log-probabilities to compare with; None compares pairs."""

    def __post_init__(self) -> None:
        Regularizer.__post_init__(self)
        check_choice("distance", self.distance, ("squared", "absolute", "cosine"))

    @property
    def reference_input(self) -> str | None:
        """The input to compare with."""
        return self.reference

    def penalty(self, batch: LossBatch) -> torch.Tensor:
        """Compute the penalty."""
        firsts, seconds = self._sides(batch)
        if self.distance == "cosine":
            similarity = load_torch().nn.functional.cosine_similarity
            cosines = [similarity(a, b, dim=0) for a, b in zip(firsts, seconds, strict=True)]
            result: torch.Tensor = 1.0 - load_torch().stack(cosines).mean()
            return result
        gaps: torch.Tensor = load_torch().cat(firsts) - load_torch().cat(seconds)
        terms = gaps.square() if self.distance == "squared" else gaps.abs()
        return terms.sum() / max(1, terms.numel())

    def _sides(self, batch: LossBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self.reference is not None:
            return batch.selected, batch.read_input(self.reference)
        firsts, seconds = batch.selected[0::2], batch.selected[1::2]
        if len(firsts) != len(seconds):
            raise InvalidInput(
                f"consistency compares pairs of datums, but the batch has {len(batch.data)}; "
                "pass an even number, or name a reference"
            )
        for index, (a, b) in enumerate(zip(firsts, seconds, strict=True)):
            if len(a) != len(b):
                raise InvalidInput(
                    f"data[{2 * index}] has {len(a)} selected targets and data[{2 * index + 1}] "
                    f"has {len(b)}; consistency compares the same answer in two contexts"
                )
        return firsts, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Orthogonality(Regularizer):
    """Mean squared cosine similarity of the log-probabilities of different datums.

    Each datum is the vector of its selected targets, padded with zeros to the longest.
    """

    kind: ClassVar[str] = "orthogonality"

    is_centered: bool = True
    """Subtract the mean of each datum. Log-probabilities have one sign: without this, no two
    datums are orthogonal."""

    def penalty(self, batch: LossBatch) -> torch.Tensor:
        """Compute the penalty; 0 for a single datum."""
        num_datums = len(batch.data)
        if num_datums > MAX_ORTHOGONAL_DATUMS:
            raise InvalidInput(
                f"orthogonality compares all datums with each other and accepts at most "
                f"{MAX_ORTHOGONAL_DATUMS}, got {num_datums}; use smaller batches"
            )
        rows = [row - row.mean() if self.is_centered else row for row in batch.selected]
        nn = load_torch().nn
        matrix = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        unit = nn.functional.normalize(matrix, dim=1)
        gram = unit @ unit.T
        squares: torch.Tensor = gram.square().sum() - gram.diagonal().square().sum()
        return squares / max(1, num_datums * (num_datums - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPenalty(Regularizer):
    """Mean of (n - target_norm)^2; n is the norm of the base loss's gradient for one datum.

    The gradient is by the log-probabilities. It is constant, and the penalty without effect, if
    the base loss is linear in them, as cross entropy is.
    """

    kind: ClassVar[str] = "gradient_penalty"

    target_norm: float = 0.0
    """The norm that is not penalized."""

    def __post_init__(self) -> None:
        Regularizer.__post_init__(self)
        check_range("target_norm", self.target_norm, at_least=0.0)

    def penalty(self, batch: LossBatch) -> torch.Tensor:
        """Compute the penalty with a gradient of second order."""
        norms: torch.Tensor = load_torch().stack(_grad_norms(batch))
        return (norms - self.target_norm).square().mean()


def _grad_norms(batch: LossBatch) -> list[torch.Tensor]:
    """Return the gradient norm of the base loss for each datum; differentiable."""
    leaves = list(batch.all_logprobs)
    if not batch.base_loss.requires_grad:
        return [leaf.new_zeros(()) for leaf in leaves]
    torch = load_torch()
    grads = torch.autograd.grad(batch.base_loss, leaves, create_graph=True, allow_unused=True)
    return [
        leaf.new_zeros(()) if grad is None else torch.linalg.vector_norm(grad)
        for leaf, grad in zip(leaves, grads, strict=True)
    ]
