"""The small steps of a layer, each as one function with a short way back.

They compute what transformers' Qwen3 does in a third of the passes over memory. Weights are
trained, so their gradients are here too.

Shape letters: T tokens, N heads, K numbers that are normed together, F width of the MLP.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn


class _RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * w, as x / s * w sqrt(K) with s = sqrt(|x|^2 + K eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        floor = torch.tensor(sqrt(width * eps), device=x.device)
        size = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)
        ctx.save_for_backward(x, weight, size)
        return torch.div(x, size).mul_(weight * sqrt(width))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, size = ctx.saved_tensors
        scale = sqrt(x.shape[-1])
        both = dy * x
        if weight.ndim == 1:
            dweight = size.reciprocal().squeeze(-1) @ both
            along = (both @ weight).unsqueeze(-1)
        else:
            dweight = torch.einsum("tnk,tn->nk", both, size.reciprocal().squeeze(-1))
            along = torch.linalg.vecdot(both, weight).unsqueeze(-1)
        along = along.div_(size).div_(size)
        # `both` is not needed any more; its memory is.
        dx = torch.mul(dy, weight, out=both).addcmul_(x, along, value=-1.0).div_(size).mul_(scale)
        return dx, dweight * scale, None


class _Rotation(torch.autograd.Function):
    """Each half of a head turned against the other by its position's angles."""

    @staticmethod
    def forward(ctx: Any, x_TNK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = (cos, sin)
        return _turned(x_TNK, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, dy_TNK: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.angles
        return _turned(dy_TNK, cos, sin, -1.0), None, None


def _turned(x_TNK: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    y_TNK = torch.empty(x_TNK.shape, dtype=x_TNK.dtype, device=x_TNK.device)
    (x1, x2), (y1, y2) = x_TNK.chunk(2, -1), y_TNK.chunk(2, -1)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin, value=sign)
    return y_TNK


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up, of both side by side."""

    @staticmethod
    def forward(ctx: Any, both_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(both_T2F)
        gate_TF, up_TF = both_T2F.chunk(2, -1)
        return nn.functional.silu(gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, dy_TF: Tensor) -> Tensor:
        (both_T2F,) = ctx.saved_tensors
        gate_TF, up_TF = both_T2F.chunk(2, -1)
        dboth_T2F = torch.empty_like(both_T2F)
        dgate_TF, dup_TF = dboth_T2F.chunk(2, -1)
        torch.mul(nn.functional.silu(gate_TF), dy_TF, out=dup_TF)
        torch.ops.aten.silu_backward.grad_input(dy_TF * up_TF, gate_TF, grad_input=dgate_TF)
        return dboth_T2F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension; the weight is (K,), or (N, K) for heads of their own."""
    y: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return y


def rotate(x_TNK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; cosines and sines are (T, 1, K / 2)."""
    y_TNK: Tensor = _Rotation.apply(x_TNK, cos, sin)  # type: ignore[no-untyped-call]
    return y_TNK


def swiglu(both_T2F: Tensor) -> Tensor:
    """What the gate lets through, of a product that holds gate and up side by side."""
    y_TF: Tensor = _SwiGlu.apply(both_T2F)  # type: ignore[no-untyped-call]
    return y_TF
