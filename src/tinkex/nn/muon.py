"""Muon: orthogonalized updates of matrices, and the `dimuon` step on an adapter's flat buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tinkex.nn.adamw import check_finite, clip_gradient, combine_norms, global_norm, step_metrics
from tinkex.nn.lora_layout import LoraLayout
from tinkex.types.optimizers import DimuonParams

#: Coefficients of the Newton-Schulz quintic; five steps bring singular values close to one.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
#: A matrix whose momentum is smaller does not change: its direction would be rounding noise.
_SMALLEST_MOMENTUM = 1e-12
_TINY = torch.finfo(torch.float32).tiny
DEFAULT_DAMPING = 1e-3
#: The rank at which the rank correction has no effect.
_REFERENCE_RANK = 32


def orthogonalize(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """Approximately orthogonalize a matrix by Newton-Schulz iteration.

    Leading dimensions are batch dimensions.
    """
    a, b, c = _QUINTIC
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if is_tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(_SMALLEST_NORM)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result


@torch.no_grad()
def dimuon_step(
    weights: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    num_steps: int,
    params: DimuonParams,
    layout: LoraLayout,
    *,
    apply_nonfinite: bool = False,
) -> Mapping[str, float]:
    """Apply step number `num_steps` to weights and momentum in place; returns AdamW's metrics.

    Every A and B matrix, and that of every expert, is updated on its own. The buffers change only
    after everything is computed: running out of memory must not leave half a step.
    """
    grad_norm = global_norm(gradient)
    check_finite(grad_norm, num_steps, apply_nonfinite=apply_nonfinite)
    new_momentum = gradient.clone()
    is_clipped = clip_gradient(new_momentum, grad_norm, params.grad_clip_norm)
    new_momentum.lerp_(momentum, params.beta1)
    update = torch.zeros_like(weights)
    damping = DEFAULT_DAMPING if params.damping is None else params.damping
    for source, target in zip(layout.pairs(new_momentum), layout.pairs(update), strict=True):
        target.down.copy_(_direction(source.down, damping))
        target.up.copy_(_direction(source.up, damping))
    exponent = params.rank_lr_correction_exponent or 0.0
    correction = (_REFERENCE_RANK / layout.rank) ** exponent
    # The Frobenius norm of every update is the learning rate times sqrt(rank).
    update.mul_(params.learning_rate * correction * math.sqrt(layout.rank))
    update_norm = combine_norms([torch.linalg.vector_norm(update)])
    momentum.copy_(new_momentum)
    weights.sub_(update)
    return step_metrics(
        weights, num_steps, params, grad_norm=grad_norm, update_norm=update_norm, clipped=is_clipped
    )


def _direction(momentum: Tensor, damping: float) -> Tensor:
    """The orthogonalized, preconditioned momentum with a norm of 1; zero for a zero momentum."""
    # Scaled first: the squares of small or large values are not representable.
    largest = momentum.abs().amax(dim=(-2, -1), keepdim=True)
    x = momentum / largest.clamp_min(_TINY)
    squares = x.square()
    mean = squares.mean(dim=(-2, -1), keepdim=True).clamp_min(_TINY)
    for dim in (-1, -2):
        x = x * (squares.mean(dim=dim, keepdim=True) / mean + damping).pow(-0.25)
    norm = x.norm(dim=(-2, -1), keepdim=True) * largest
    x = orthogonalize(x)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(_SMALLEST_NORM)
    return torch.where(norm < _SMALLEST_MOMENTUM, torch.zeros_like(x), x)
