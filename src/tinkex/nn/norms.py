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

from tinkex.nn.native import rows


class RmsNorm(nn.Module):
    """A norm with fixed weights: (K,), or (heads, K) for a weight of each head's own."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        width = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self.scale = weight * sqrt(width)
        self.floor = width * eps
        self._floor_root = torch.tensor(sqrt(self.floor), device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """The normed input, in a new tensor."""
        if torch.is_grad_enabled() and x.requires_grad:
            y: Tensor = _Differentiated.apply(x, self)  # type: ignore[no-untyped-call]
            return y
        if self.scale.ndim == 1 and rows.are_suited(x, self.scale):
            return rows.normed(x, self.scale, self.floor)
        return self.normed(x)[0]

    def normed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normed input, and the size of each row."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        size = torch.hypot(size, self._floor_root)
        return torch.div(x, size).mul_(self.scale), size

    def pull(self, x: Tensor, size: Tensor, dy: Tensor) -> Tensor:
        """The input's gradient, in a new tensor."""
        dx = dy * self.scale
        along = torch.linalg.vecdot(dx, x).unsqueeze(-1).div_(size).div_(size)
        return dx.addcmul_(x, along, value=-1.0).div_(size)


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: RmsNorm) -> Tensor:
        y, size = norm.normed(x)
        ctx.save_for_backward(x, size)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        x, size = ctx.saved_tensors
        return ctx.norm.pull(x, size, dy), None


def norm_twins(module: nn.Module) -> list[RmsNorm]:
    """What may compute the same as a module, if it looks like a norm."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    is_norm = len(parameters) == 1 and weight is not None and weight.ndim == 1
    if not is_norm or weight is None or weight.dtype != torch.float32 or not isinstance(eps, float):
        return []
    # Gemma's norms keep how far their weights are from one.
    return [RmsNorm(weight.detach(), eps), RmsNorm(1.0 + weight.detach(), eps)]
