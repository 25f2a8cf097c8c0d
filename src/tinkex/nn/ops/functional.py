"""The small steps of a layer, each as one function with a short way back.

They compute what transformers' Qwen3 does in a third of the passes over memory, or in one where
`native` has a kernel for it. Weights are trained, so their gradients are here too.

Shape letters: T tokens, N heads, H query heads, G key heads, K numbers that are normed together,
F width of the MLP.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from tinkex.nn.ops import training_kernels
from tinkex.nn.ops.training_kernels import QKRotary


class _AddRMSNormFunction(torch.autograd.Function):
    """Two tensors' sum, and its norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.is_native, ctx.eps = training_kernels.can_use_training_kernels(x, delta, weight), eps
        if ctx.is_native:
            total, y = training_kernels.add_rms_norm_forward(x, delta, weight, eps)
            ctx.save_for_backward(total, weight)
            return total, y
        total = x + delta
        y, size = _rms_norm_torch(total, weight, eps)
        ctx.save_for_backward(total, weight, size)
        return total, y

    @staticmethod
    def backward(
        ctx: Any, dtotal: Tensor | None, dy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if dy is None:
            return dtotal, dtotal, None, None
        total, weight, *size = ctx.saved_tensors
        if ctx.is_native:
            more = None if dtotal is None else dtotal.contiguous()
            dx, dweight = training_kernels.add_rms_norm_backward(
                total, weight, ctx.eps, more, dy.contiguous()
            )
        else:
            dx, dweight = _rms_norm_backward_torch(total, weight, size[0], dy)
            dx = dx if dtotal is None else dx.add_(dtotal)
        return dx, dx, dweight, None


class _TrainableRMSNormFunction(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * w, as x / s * w sqrt(K) with s = sqrt(|x|^2 + K eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.is_native, ctx.eps = (
            weight.ndim == 1 and training_kernels.can_use_training_kernels(x, weight),
            eps,
        )
        if ctx.is_native:
            ctx.save_for_backward(x, weight)
            return training_kernels.add_rms_norm_forward(x, None, weight, eps)[1]
        y, size = _rms_norm_torch(x, weight, eps)
        ctx.save_for_backward(x, weight, size)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, *size = ctx.saved_tensors
        if ctx.is_native:
            dx, dweight = training_kernels.add_rms_norm_backward(
                x, weight, ctx.eps, None, dy.contiguous()
            )
        else:
            dx, dweight = _rms_norm_backward_torch(x, weight, size[0], dy)
        return dx, dweight, None


def _rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    floor = torch.tensor(sqrt(width * eps), device=x.device)
    size = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)
    return torch.div(x, size).mul_(weight * sqrt(width)), size


def _rms_norm_backward_torch(
    x: Tensor, weight: Tensor, size: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor]:
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
    return dx, dweight * scale


class _SplitQKVRotaryFunction(torch.autograd.Function):
    """Queries and keys, normed and turned, and values, of rows that hold all three."""

    @staticmethod
    def forward(
        ctx: Any, all_TNK: Tensor, q_weight_K: Tensor, k_weight_K: Tensor, rotary: QKRotary
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(all_TNK)
        ctx.how = rotary
        q_THK, k_TGK = training_kernels.rotary_forward(all_TNK, rotary)
        return q_THK, k_TGK, all_TNK[:, rotary.num_query_heads + rotary.num_kv_heads :]

    @staticmethod
    def backward(
        ctx: Any, dq_THK: Tensor, dk_TGK: Tensor, dv_TGK: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        (all_TNK,) = ctx.saved_tensors
        dall_TNK, dweights_2K = training_kernels.rotary_backward(
            all_TNK, ctx.how, dq_THK, dk_TGK, dv_TGK
        )
        if ctx.how.q_weight_K is None:
            return dall_TNK, None, None, None
        return dall_TNK, dweights_2K[0], dweights_2K[1], None


class _RotaryFunction(torch.autograd.Function):
    """Each half of a head turned against the other by its position's angles."""

    @staticmethod
    def forward(ctx: Any, x_TNK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = (cos, sin)
        return _rotate_halves(x_TNK, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, dy_TNK: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.angles
        return _rotate_halves(dy_TNK, cos, sin, -1.0), None, None


def _rotate_halves(x_TNK: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    y_TNK = torch.empty(x_TNK.shape, dtype=x_TNK.dtype, device=x_TNK.device)
    (x1, x2), (y1, y2) = x_TNK.chunk(2, -1), y_TNK.chunk(2, -1)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin, value=sign)
    return y_TNK


class _SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up, of both side by side."""

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        # Halves of a row must be whole for the kernels too.
        ctx.is_native = gate_up_T2F.shape[
            -1
        ] % 16 == 0 and training_kernels.can_use_training_kernels(gate_up_T2F)
        if ctx.is_native:
            return training_kernels.swiglu_forward(gate_up_T2F)
        gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
        return nn.functional.silu(gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, dy_TF: Tensor) -> Tensor:
        (both_T2F,) = ctx.saved_tensors
        if ctx.is_native:
            return training_kernels.swiglu_backward(both_T2F, dy_TF.contiguous())
        gate_TF, up_TF = both_T2F.chunk(2, -1)
        dboth_T2F = torch.empty_like(both_T2F)
        dgate_TF, dup_TF = dboth_T2F.chunk(2, -1)
        torch.mul(nn.functional.silu(gate_TF), dy_TF, out=dup_TF)
        torch.ops.aten.silu_backward.grad_input(dy_TF * up_TF, gate_TF, grad_input=dgate_TF)
        return dboth_T2F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension; the weight is (K,), or (N, K) for heads of their own."""
    y: Tensor = _TrainableRMSNormFunction.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return y


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of both, and its norm over the last dimension."""
    found: tuple[Tensor, Tensor] = _AddRMSNormFunction.apply(x, delta, weight, eps)  # type: ignore[no-untyped-call]
    return found


def split_qkv_rotary(all_TNK: Tensor, rotary: QKRotary) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed if they have norms, and turned by their positions; and values."""
    weights = (rotary.q_weight_K, rotary.k_weight_K)
    if rotary.can_use_kernel(all_TNK):
        found: tuple[Tensor, Tensor, Tensor] = _SplitQKVRotaryFunction.apply(
            all_TNK, *weights, rotary
        )  # type: ignore[no-untyped-call]
        return found
    sizes = [rotary.num_query_heads, rotary.num_kv_heads]
    turned_TNK, v_TGK = all_TNK.split([sum(sizes), rotary.num_kv_heads], dim=1)
    if rotary.q_weight_K is not None and rotary.k_weight_K is not None:
        spread = zip((rotary.q_weight_K, rotary.k_weight_K), sizes, strict=True)
        weight_NK = torch.cat([weight_K.expand(num, -1) for weight_K, num in spread])
        turned_TNK = rms_norm(turned_TNK, weight_NK, rotary.eps)
    q_THK, k_TGK = apply_rotary(turned_TNK, rotary.cos_T1h, rotary.sin_T1h).split(sizes, dim=1)
    return q_THK, k_TGK, v_TGK


def apply_rotary(x_TNK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; cosines and sines are (T, 1, K / 2)."""
    y_TNK: Tensor = _RotaryFunction.apply(x_TNK, cos, sin)  # type: ignore[no-untyped-call]
    return y_TNK


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """What the gate lets through, of a product that holds gate and up side by side."""
    y_TF: Tensor = _SwiGLUFunction.apply(gate_up_T2F)  # type: ignore[no-untyped-call]
    return y_TF
