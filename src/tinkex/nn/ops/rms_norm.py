"""RMS norm: a frozen module for hosted models and differentiable functions for training.

x / sqrt(mean(x^2) + eps) * w is computed as x / s * v with s = sqrt(|x|^2 + K eps) and
v = w sqrt(K), which saves the mean and one square root.

Shape letters: R rows, K width of the norm; `...` rows, or rows and heads.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tinkex.nn.ops.autograd import (
    NUM_PARTIALS,
    FunctionContext,
    call_kernel,
    can_use_kernels,
)


class FrozenRMSNorm(nn.Module):
    """A norm whose weight is not trained: (K,), or (heads, K) for a separate weight per head.

    The backward pass runs in torch; passes without gradients use the C kernel where it applies.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        width = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self.scale = weight * sqrt(width)
        self.eps_sum = width * eps
        self._eps_sum_root = torch.tensor(sqrt(self.eps_sum), device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input in a new tensor."""
        if torch.is_grad_enabled() and x.requires_grad:
            y: Tensor = _FrozenRMSNormFunction.apply(x, self)  # type: ignore[no-untyped-call]
            return y
        if self.scale.ndim == 1 and can_use_kernels(x, self.scale):
            return _kernel_forward(x, None, self.scale, self.eps_sum)[1]
        return self.normalize(x)[0]

    def normalize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalized input and the norm s of each row, which `backward` needs."""
        return _normalize(x, self.scale, self._eps_sum_root)

    def backward(self, x: Tensor, size: Tensor, dy: Tensor) -> Tensor:
        """Return the gradient w.r.t. the input in a new tensor."""
        dx = dy * self.scale
        projection = torch.linalg.vecdot(dx, x).unsqueeze(-1).div_(size).div_(size)
        return dx.addcmul_(x, projection, value=-1.0).div_(size)


class _FrozenRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext[FrozenRMSNorm], x: Tensor, norm: FrozenRMSNorm) -> Tensor:
        y, size = norm.normalize(x)
        ctx.save_for_backward(x, size)
        ctx.state = norm
        return y

    @staticmethod
    def backward(ctx: FunctionContext[FrozenRMSNorm], dy: Tensor) -> tuple[Tensor, None]:
        x, size = ctx.saved_tensors
        return ctx.state.backward(x, size, dy), None


def rms_norm_candidates(module: nn.Module) -> list[FrozenRMSNorm]:
    """Frozen norms that may be equivalent to a module; none if it does not look like a norm."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    is_norm = len(parameters) == 1 and weight is not None and weight.ndim == 1
    if not is_norm or weight is None or weight.dtype != torch.float32 or not isinstance(eps, float):
        return []
    # Gemma stores weight - 1.
    return [FrozenRMSNorm(weight.detach(), eps), FrozenRMSNorm(1.0 + weight.detach(), eps)]


# --- with gradients of the weight -----------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize over the last dimension; the weight is (K,), or (N, K) for N heads."""
    y: Tensor = _RMSNormFunction.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return y


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + delta and its norm over the last dimension."""
    total_and_norm: tuple[Tensor, Tensor] = _AddRMSNormFunction.apply(x, delta, weight, eps)  # type: ignore[no-untyped-call]
    return total_and_norm


class _NormState(NamedTuple):
    eps: float
    uses_kernel: bool


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext[_NormState], x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.state = _NormState(eps, weight.ndim == 1 and can_use_kernels(x, weight))
        return _forward(ctx, x, None, weight)[1]

    @staticmethod
    def backward(ctx: FunctionContext[_NormState], dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_backward(ctx, None, dy), None


class _AddRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[_NormState], x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.state = _NormState(eps, can_use_kernels(x, delta, weight))
        return _forward(ctx, x, delta, weight)

    @staticmethod
    def backward(
        ctx: FunctionContext[_NormState], dtotal: Tensor | None, dy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if dy is None:
            return dtotal, dtotal, None, None
        dx, dweight = _backward(ctx, dtotal, dy)
        return dx, dx, dweight, None


def _forward(
    ctx: FunctionContext[_NormState], x: Tensor, delta: Tensor | None, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum (x itself without a delta) and its norm; saves what `_backward` needs."""
    width, (eps, uses_kernel) = x.shape[-1], ctx.state
    scale = weight * sqrt(width)
    if uses_kernel:
        total, y = _kernel_forward(x, delta, scale, width * eps)
        ctx.save_for_backward(total, weight)
        return total, y
    total = x if delta is None else x + delta
    y, size = _normalize(total, scale, torch.tensor(sqrt(width * eps), device=x.device))
    ctx.save_for_backward(total, weight, size)
    return total, y


def _backward(
    ctx: FunctionContext[_NormState], dtotal: Tensor | None, dy: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients w.r.t. the sum, including the sum's own gradient, and w.r.t. the weight."""
    total, weight, *size = ctx.saved_tensors
    if ctx.state.uses_kernel:
        residual_grad = None if dtotal is None else dtotal.contiguous()
        return _kernel_backward(total, weight, ctx.state.eps, residual_grad, dy.contiguous())
    dx, dweight = _torch_backward(total, weight, size[0], dy)
    return dx if dtotal is None else dx.add_(dtotal), dweight


# --- torch ----------------------------------------------------------------------------------------


def _normalize(x: Tensor, scale: Tensor, eps_sum_root: Tensor) -> tuple[Tensor, Tensor]:
    size = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), eps_sum_root)
    return torch.div(x, size).mul_(scale), size


def _torch_backward(x: Tensor, weight: Tensor, size: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    scale = sqrt(x.shape[-1])
    product = dy * x
    if weight.ndim == 1:
        dweight = size.reciprocal().squeeze(-1) @ product
        projection = (product @ weight).unsqueeze(-1)
    else:
        dweight = torch.einsum("tnk,tn->nk", product, size.reciprocal().squeeze(-1))
        projection = torch.linalg.vecdot(product, weight).unsqueeze(-1)
    projection = projection.div_(size).div_(size)
    # The product is not needed again, so dx reuses its memory.
    dx = torch.mul(dy, weight, out=product)
    dx = dx.addcmul_(x, projection, value=-1.0).div_(size).mul_(scale)
    return dx, dweight * scale


# --- C kernels ------------------------------------------------------------------------------------


def _kernel_forward(
    x: Tensor, delta: Tensor | None, scale_K: Tensor, eps_sum: float
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    total = x if delta is None else torch.empty_like(x)
    y = torch.empty_like(x)
    call_kernel(
        *("add_rms_norm_forward", x, delta, scale_K, eps_sum),
        *(x.numel() // width, width, total, y),
    )
    return total, y


def _kernel_backward(
    total: Tensor, weight_K: Tensor, eps: float, residual_grad: Tensor | None, dy: Tensor
) -> tuple[Tensor, Tensor]:
    width = total.shape[-1]
    dx, dscales_PK = torch.empty_like(total), total.new_empty(NUM_PARTIALS, width)
    scale_K = weight_K * sqrt(width)
    call_kernel(
        *("add_rms_norm_backward", total, dy, residual_grad, scale_K, width * eps),
        *(total.numel() // width, width, dx, dscales_PK),
    )
    return dx, dscales_PK.sum(0).mul_(sqrt(width))
