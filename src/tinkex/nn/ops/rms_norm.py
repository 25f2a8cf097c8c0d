"""Root-mean-square norms in few steps, and a short way back.

x / sqrt(mean(x^2) + eps) * w is computed as x / s * v, where s = sqrt(|x|^2 + K eps), so that
neither a mean nor a root stands between, and v = w sqrt(K).

Shape letters: K numbers that are normed together; `...` rows, or rows and heads.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from tinkex.nn.ops import inference_kernels


class FrozenRMSNorm(nn.Module):
    """A norm with fixed weights: (K,), or (heads, K) for a weight of each head's own."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        width = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self.scale = weight * sqrt(width)
        self.eps_sum = width * eps
        self._eps_sum_root = torch.tensor(sqrt(self.eps_sum), device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """The normed input, in a new tensor."""
        if torch.is_grad_enabled() and x.requires_grad:
            y: Tensor = _RMSNormFunction.apply(x, self)  # type: ignore[no-untyped-call]
            return y
        if self.scale.ndim == 1 and inference_kernels.can_use_kernels(x, self.scale):
            return inference_kernels.rms_norm_forward(x, self.scale, self.eps_sum)
        return self.normalize(x)[0]

    def normalize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normed input, and the size of each row."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        size = torch.hypot(size, self._eps_sum_root)
        return torch.div(x, size).mul_(self.scale), size

    def backward(self, x: Tensor, size: Tensor, dy: Tensor) -> Tensor:
        """The input's gradient, in a new tensor."""
        dx = dy * self.scale
        along = torch.linalg.vecdot(dx, x).unsqueeze(-1).div_(size).div_(size)
        return dx.addcmul_(x, along, value=-1.0).div_(size)


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: FrozenRMSNorm) -> Tensor:
        y, size = norm.normalize(x)
        ctx.save_for_backward(x, size)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        x, size = ctx.saved_tensors
        return ctx.norm.backward(x, size, dy), None


def rms_norm_candidates(module: nn.Module) -> list[FrozenRMSNorm]:
    """What may compute the same as a module, if it looks like a norm."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    is_norm = len(parameters) == 1 and weight is not None and weight.ndim == 1
    if not is_norm or weight is None or weight.dtype != torch.float32 or not isinstance(eps, float):
        return []
    # Gemma's norms keep how far their weights are from one.
    return [FrozenRMSNorm(weight.detach(), eps), FrozenRMSNorm(1.0 + weight.detach(), eps)]
