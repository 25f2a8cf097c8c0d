"""AdamW on flat buffers with the results of torch.optim.AdamW, plus metrics of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tinkex.errors import InvalidInput
from tinkex.types import AdamParams
from tinkex.types.optimizers import DimuonParams

#: Elements per block: small enough to stay in the CPU cache while norms are computed.
_BLOCK = 1 << 18
#: torch.nn.utils.clip_grad_norm_ adds this to the norm before dividing.
_CLIP_EPS = 1e-6
#: A smaller eps is zero in float32, and a zero gradient would then compute 0 / 0.
_MIN_EPS = torch.finfo(torch.float32).tiny


class NonFiniteGradient(InvalidInput):
    """The accumulated gradient contains NaN or infinity."""

    hint = "Lower the learning rate, clip with grad_clip_norm, or look for extreme loss inputs."


@torch.no_grad()
def adamw_step(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    num_steps: int,
    params: AdamParams,
    *,
    apply_nonfinite: bool = False,
) -> Mapping[str, float]:
    """Apply step number `num_steps`, counted from 1, to the buffers in place; returns metrics.

    Clipping changes the gradient as well.
    """
    grad_norm = global_norm(gradient)
    check_finite(grad_norm, num_steps, apply_nonfinite=apply_nonfinite)
    is_clipped = clip_gradient(gradient, grad_norm, params.grad_clip_norm)
    update_norm = _update_blocks([weights, gradient, exp_avg, exp_avg_sq], num_steps, params)
    return step_metrics(
        weights, num_steps, params, grad_norm=grad_norm, update_norm=update_norm, clipped=is_clipped
    )


def check_finite(grad_norm: float, num_steps: int, *, apply_nonfinite: bool) -> None:
    """Raise NonFiniteGradient, unless such gradients are applied."""
    if not math.isfinite(grad_norm) and not apply_nonfinite:
        raise NonFiniteGradient(
            f"the gradient of step {num_steps} has NaN or infinity, so the step was not taken"
        )


def step_metrics(
    weights: Tensor,
    num_steps: int,
    params: AdamParams | DimuonParams,
    *,
    grad_norm: float,
    update_norm: float,
    clipped: bool,
) -> Mapping[str, float]:
    """Return the metrics of a step, given the new weights."""
    return {
        "grad_norm": grad_norm,
        "learning_rate": params.learning_rate,
        "param_norm": global_norm(weights),
        "update_norm": update_norm,
        "step": float(num_steps),
        "clipped": float(clipped),
        "has_gradient": 1.0,
    }


def skipped_step_metrics(
    weights: Tensor, num_steps: int, params: AdamParams | DimuonParams
) -> Mapping[str, float]:
    """Return the metrics of a step without a gradient, which changes nothing."""
    metrics = step_metrics(
        weights, num_steps, params, grad_norm=0.0, update_norm=0.0, clipped=False
    )
    return {**metrics, "has_gradient": 0.0}


def clip_gradient(gradient: Tensor, norm: float, max_norm: float) -> bool:
    """Clip like torch.nn.utils.clip_grad_norm_; returns whether the gradient was scaled."""
    if max_norm <= 0.0:
        return False
    scale = max_norm / (norm + _CLIP_EPS)
    if scale < 1.0:
        gradient.mul_(scale)
    return scale < 1.0


def _update_blocks(buffers: Sequence[Tensor], num_steps: int, params: AdamParams) -> float:
    """Update block by block; returns the norm of the change of the weights."""
    step = torch.tensor(float(num_steps), device=buffers[0].device)
    update_norms = []
    # Allocated before the first change: running out of memory must not leave half a step.
    scratch = torch.empty_like(_blocks(buffers[0])[0])
    for weights, gradient, first, second in zip(*map(_blocks, buffers), strict=True):
        before = scratch[: len(weights)].copy_(weights)
        torch._fused_adamw_(
            [weights],
            [gradient],
            [first],
            [second],
            [],
            [step],
            lr=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            weight_decay=params.weight_decay,
            eps=max(params.eps, _MIN_EPS),
            amsgrad=False,
            maximize=False,
        )
        update_norms.append(torch.linalg.vector_norm(before.sub_(weights)))
    return combine_norms(update_norms)


def global_norm(flat: Tensor) -> float:
    """The norm of a buffer, computed block by block."""
    norm = combine_norms([torch.linalg.vector_norm(block) for block in _blocks(flat)])
    if math.isfinite(norm):
        return norm
    # The elements may be finite while their squares overflow float32.
    return combine_norms([torch.linalg.vector_norm(x, dtype=torch.float64) for x in _blocks(flat)])


def _blocks(flat: Tensor) -> Sequence[Tensor]:
    return flat.split(_BLOCK) if flat.device.type == "cpu" else (flat,)


def combine_norms(norms: Sequence[Tensor]) -> float:
    """The norm of all blocks, given the norm of each."""
    return float(torch.linalg.vector_norm(torch.stack(list(norms)), dtype=torch.float64))
