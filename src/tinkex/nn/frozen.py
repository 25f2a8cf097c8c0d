"""Frozen weights: x W + b and its way back, without a gradient of W.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tinkex.nn.native.panels import PackedWeight, can_pack

#: How many rows oneDNN multiplies faster by a weight that is packed for it.
_FEW_ROWS = range(2, 65)


class FrozenLinear:
    """The weights of linear maps of one input, side by side.

    Where our own kernels run, the weight lies in panels for them; elsewhere as torch wants it.
    """

    def __init__(self, weight_KN: Tensor, bias_N: Tensor | None) -> None:
        self.shape_KN = weight_KN.shape
        self.num_bytes = weight_KN.nbytes
        self.bias_N = bias_N
        self.packed_weight = PackedWeight(weight_KN) if can_pack(weight_KN) else None
        """The weight for our own kernels; None where torch computes."""
        self._weight_KN = None if self.packed_weight is not None else weight_KN.contiguous()
        self._packed_transpose: PackedWeight | None = None
        self._onednn_weight: Tensor | None = None

    @classmethod
    def from_modules(cls, members: Sequence[nn.Module]) -> FrozenLinear:
        """The maps of linear modules; they are copied, because inputs first is faster to read."""
        weights = [_weight_NK(member).t() for member in members]
        weight_KN = weights[0] if len(weights) == 1 else torch.cat(weights, dim=1)
        return cls(weight_KN, _merge_biases(members))

    @property
    def weight_KN(self) -> Tensor:
        """The weight, inputs first; a copy if it lies in panels."""
        if self.packed_weight is not None:
            return self.packed_weight.weight_KN()
        assert self._weight_KN is not None
        return self._weight_KN

    @property
    def has_packed_copy(self) -> bool:
        """Whether there is a second copy of the weight."""
        return self._packed_transpose is not None or self._onednn_weight is not None

    def make_packed_copy(self) -> None:
        """Keep a second copy of the weight: for the way back, or without panels for few rows."""
        weight_KN = self.weight_KN
        if self.packed_weight is not None:
            self._packed_transpose = PackedWeight(weight_KN.t())
            return
        is_plain = weight_KN.dtype == torch.float32 and weight_KN.device.type == "cpu"
        if is_plain and torch.backends.mkldnn.is_available():
            self._onednn_weight = torch.ops.mkldnn._reorder_linear_weight(
                weight_KN.t().contiguous()
            )

    def forward(self, x_MK: Tensor) -> Tensor:
        """x W + b, in a new tensor; how it is computed depends on the number of rows alone."""
        if self.packed_weight is not None:
            return self.packed_weight.matmul(x_MK, self.bias_N)
        if self._onednn_weight is not None and len(x_MK) in _FEW_ROWS:
            onednn = torch.ops.mkldnn._linear_pointwise
            y_MN: Tensor = onednn(x_MK, self._onednn_weight, self.bias_N, "none", [], "")
            return y_MN
        if self.bias_N is None:
            return torch.mm(x_MK, self.weight_KN)
        return torch.addmm(self.bias_N, x_MK, self.weight_KN)

    def backward(self, dy_MN: Tensor) -> Tensor:
        """dy W^T, in a new tensor."""
        if self._packed_transpose is not None:
            return self._packed_transpose.matmul(dy_MN)
        return torch.mm(dy_MN, self.weight_KN.t())


def linear_out_features(member: nn.Module) -> int:
    """How many outputs a linear module has."""
    return int(_weight_NK(member).shape[0])


def _weight_NK(member: nn.Module) -> Tensor:
    weight = member.weight
    assert isinstance(weight, Tensor)
    # Whatever is not a linear module is a Conv1D, which is one written the other way round.
    return weight.detach() if isinstance(member, nn.Linear) else weight.detach().t()


def _merge_biases(members: Sequence[nn.Module]) -> Tensor | None:
    biases = [member.bias for member in members]
    if all(bias is None for bias in biases):
        return None
    parts = [
        bias.detach() if isinstance(bias, Tensor) else _weight_NK(member)[:, 0] * 0
        for bias, member in zip(biases, members, strict=True)
    ]
    return torch.cat(parts)
