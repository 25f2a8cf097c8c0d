"""Frozen weights: x W + b and its way back, without a gradient of W.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

#: How many rows oneDNN multiplies faster by a weight that is packed for it.
_FEW_ROWS = range(2, 65)


class Frozen:
    """The weights of linear maps of one input, side by side."""

    def __init__(self, weight_KN: Tensor, bias_N: Tensor | None) -> None:
        self.weight_KN = weight_KN
        self._bias_N = bias_N
        self._packed: Tensor | None = None

    @classmethod
    def joined(cls, members: Sequence[nn.Module]) -> Frozen:
        """The maps of linear modules; they are copied, because inputs first is faster to read."""
        weights = [_weight_NK(member).t() for member in members]
        if len(weights) == 1:
            return cls(weights[0].contiguous(), _joined_bias(members))
        return cls(torch.cat(weights, dim=1), _joined_bias(members))

    @property
    def weight_NK(self) -> Tensor:
        """The weight as linear modules have it."""
        return self.weight_KN.t()

    def pack(self) -> None:
        """Keep a second copy of the weight, as large as the first, for passes of few rows."""
        weight = self.weight_KN
        is_suited = weight.dtype == torch.float32 and weight.device.type == "cpu"
        if is_suited and torch.backends.mkldnn.is_available():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight_NK.contiguous())

    def forward(self, x_MK: Tensor) -> Tensor:
        """x W + b, in a new tensor; how it is computed depends on the number of rows alone."""
        if self._packed is not None and len(x_MK) in _FEW_ROWS:
            onednn = torch.ops.mkldnn._linear_pointwise
            y_MN: Tensor = onednn(x_MK, self._packed, self._bias_N, "none", [], "")
            return y_MN
        if self._bias_N is None:
            return torch.mm(x_MK, self.weight_KN)
        return torch.addmm(self._bias_N, x_MK, self.weight_KN)

    def pull(self, dy_MN: Tensor) -> Tensor:
        """dy W^T, in a new tensor."""
        return torch.mm(dy_MN, self.weight_KN.t())


def out_features(member: nn.Module) -> int:
    """How many outputs a linear module has."""
    return int(_weight_NK(member).shape[0])


def _weight_NK(member: nn.Module) -> Tensor:
    weight = member.weight
    assert isinstance(weight, Tensor)
    # Whatever is not a linear module is a Conv1D, which is one written the other way round.
    return weight.detach() if isinstance(member, nn.Linear) else weight.detach().t()


def _joined_bias(members: Sequence[nn.Module]) -> Tensor | None:
    biases = [member.bias for member in members]
    if all(bias is None for bias in biases):
        return None
    parts = [
        bias.detach() if isinstance(bias, Tensor) else _weight_NK(member)[:, 0] * 0
        for bias, member in zip(biases, members, strict=True)
    ]
    return torch.cat(parts)
