"""Add regularizers to a custom loss, with metrics of each term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tinkex.client.custom_loss import CustomLossFnV1, LossHandle, check_loss_fn, run_loss_handle
from tinkex.client.loss_graph import load_torch
from tinkex.errors import InvalidInput
from tinkex.regularizers.base import LossBatch, Regularizer
from tinkex.types import Datum
from tinkex.types.tensors import is_torch_tensor

if TYPE_CHECKING:
    import torch

#: Maximum number of regularizers of a loss.
MAX_REGULARIZERS = 32


def with_regularizers(
    loss_fn: CustomLossFnV1 | LossHandle,
    regularizers: Sequence[Regularizer],
    *,
    grad_norms: bool = True,
) -> CustomLossFnV1:
    """Return a custom loss: loss_fn plus weight times penalty of each regularizer.

    Metrics: `base_loss`, and `regularizer/NAME` with the penalty without its weight. `grad_norms`
    adds `.../grad_norm`, the gradient norm of each weighted term by the log-probabilities.
    """
    check_loss_fn(loss_fn)
    terms = tuple(regularizers)
    check_regularizers(terms)

    def regularized(
        data: list[Datum], logprobs: list[Any]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        leaves = list(logprobs)
        base, metrics = _run_base(loss_fn, data, logprobs)
        batch = LossBatch(data, leaves, base)
        total, metrics = base, {**metrics, "base_loss": float(base.detach())}
        if grad_norms:
            metrics["base_loss/grad_norm"] = _grad_norm(base, leaves)
        for term in terms:
            value = _compute_penalty(term, batch)
            weighted = term.weight * value
            total = total + weighted
            metrics[f"regularizer/{term.label}"] = float(value.detach())
            if grad_norms:
                metrics[f"regularizer/{term.label}/grad_norm"] = _grad_norm(weighted, leaves)
        return total, metrics

    return regularized


def check_regularizers(regularizers: Sequence[object]) -> None:
    """Check the number of regularizers, their types and that their names differ."""
    if len(regularizers) > MAX_REGULARIZERS:
        raise InvalidInput(
            f"{len(regularizers)} regularizers were given; at most {MAX_REGULARIZERS} are allowed"
        )
    labels: set[str] = set()
    for term in regularizers:
        if not isinstance(term, Regularizer):
            raise InvalidInput(f"a regularizer is {term!r:.80}; expected a Regularizer")
        if term.label in labels:
            raise InvalidInput(
                f"two regularizers are named {term.label!r}; give one of them another name"
            )
        labels.add(term.label)


def _run_base(
    loss_fn: CustomLossFnV1 | LossHandle, data: list[Datum], logprobs: list[Any]
) -> tuple[torch.Tensor, dict[str, float]]:
    if isinstance(loss_fn, LossHandle):
        return run_loss_handle(loss_fn, data, logprobs)
    result: object = loss_fn(data, logprobs)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise InvalidInput(f"the custom loss returned {result!r:.80}; expected (loss, metrics)")
    loss, metrics = result
    if not is_torch_tensor(loss) or loss.numel() != 1 or loss.is_complex():
        raise InvalidInput(
            f"the custom loss returned {loss!r:.80} as its loss; expected a real scalar tensor"
        )
    return loss.reshape(()), dict(metrics)


def _compute_penalty(term: Regularizer, batch: LossBatch) -> torch.Tensor:
    value = term.penalty(batch)
    if not is_torch_tensor(value) or value.ndim != 0:
        raise InvalidInput(
            f"the regularizer {term.label!r} returned {value!r:.80}; expected a scalar tensor"
        )
    number = float(value.detach())
    if not math.isfinite(number):
        raise InvalidInput(f"the regularizer {term.label!r} is {number}; it must be finite")
    return value


def _grad_norm(value: torch.Tensor, leaves: Sequence[torch.Tensor]) -> float:
    torch = load_torch()
    if not value.requires_grad:
        return 0.0
    grads = torch.autograd.grad(value, list(leaves), retain_graph=True, allow_unused=True)
    norms = [torch.linalg.vector_norm(grad) for grad in grads if grad is not None]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
