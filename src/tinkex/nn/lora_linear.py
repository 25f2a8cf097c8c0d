"""Frozen weights: x W + b and its way back, without a gradient of W.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tinkex.nn.forward_context import LoraRows, active_context, active_forward
from tinkex.nn.ops.packed_matmul import PackedWeight, can_pack

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


class MergedLoraLinear:
    """Frozen linear maps of one input, side by side."""

    def __init__(self, target_index: int, members: Sequence[nn.Module]) -> None:
        self.target_index = target_index
        self.sizes = [linear_out_features(member) for member in members]
        self.frozen = FrozenLinear.from_modules(members)
        # Autograd records an operation only if an input wants a gradient; adapters are no inputs.
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def in_features(self) -> int:
        """How many inputs there are."""
        return self.frozen.shape_KN[0]

    @property
    def weights(self) -> Sequence[Tensor]:
        """The members' frozen weights, each (N_i, K)."""
        return torch.split(self.frozen.weight_KN.t(), self.sizes)

    @property
    def num_bytes(self) -> int:
        """How much memory the frozen weights take, and a copy of them again."""
        return self.frozen.num_bytes

    @property
    def has_packed_copy(self) -> bool:
        """Whether there is a second copy of the weights."""
        return self.frozen.has_packed_copy

    def make_packed_copy(self) -> None:
        """Keep a second copy of the weights, with which some products are faster."""
        self.frozen.make_packed_copy()

    def member_output(self, index: int, x: Tensor) -> Tensor:
        """What one member makes of its input; nothing is kept once all have asked."""
        if len(self.sizes) == 1:
            return self.merged_output(x)
        kept = active_forward().saved
        found = kept.pop(self, None)
        if found is None or found[0] is not x or found[1][index] is None:
            found = (x, list(self.merged_output(x).split(self.sizes, dim=-1)))
        output: Tensor = found[1][index]
        found[1][index] = None
        if any(rest is not None for rest in found[1]):
            kept[self] = found
        return output

    def merged_output(self, x: Tensor) -> Tensor:
        """The outputs of all members, side by side."""
        rows = active_context().lora
        if not torch.is_grad_enabled():
            y_MN, _ = self.forward(x.reshape(-1, x.shape[-1]), rows)
            return y_MN.view(*x.shape[:-1], -1)
        anchor = self._anchor if rows.is_trained(self.target_index) else None
        y: Tensor = _MergedLoraLinearFunction.apply(x, anchor, self, rows)  # type: ignore[no-untyped-call]
        return y

    def forward(self, x_MK: Tensor, lora: LoraRows) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The outputs of all members, and what `pull` needs of the low-rank part."""
        y_MN = self.frozen.forward(x_MK)
        return y_MN, lora.add(self.target_index, x_MK, y_MN) or ()

    def backward(
        self, lora: LoraRows, x_MK: Tensor, dy_MN: Tensor, saved: Any, *, needs_input_grad: bool
    ) -> Tensor | None:
        """Gather the adapters' gradients; returns the input's if it is wanted."""
        dx_MK = self.frozen.backward(dy_MN) if needs_input_grad else None
        lora.backward(self.target_index, x_MK, dy_MN, saved, dx_MK)
        return dx_MK


class _MergedLoraLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor | None, group: MergedLoraLinear, lora: LoraRows
    ) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        y_MN, kept = group.forward(x_MK, lora)
        # All tensors go this way, so that they can be forgotten and computed again.
        ctx.save_for_backward(x_MK, *kept)
        ctx.group, ctx.rows, ctx.shape = group, lora, x.shape
        return y_MN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        x_MK, *kept = ctx.saved_tensors
        dy_MN = dy.reshape(-1, dy.shape[-1])
        dx_MK = ctx.group.backward(
            ctx.rows, x_MK, dy_MN, kept, needs_input_grad=ctx.needs_input_grad[0]
        )
        return (dx_MK.view(ctx.shape) if dx_MK is not None else None), None, None, None


class MergedLinearPart(nn.Module):
    """Stands where a linear module stood."""

    def __init__(self, group: MergedLoraLinear, index: int) -> None:
        super().__init__()
        self.group = group
        self.in_features, self.out_features = group.in_features, group.sizes[index]
        self._index = index

    @property
    def weight(self) -> Tensor:
        """The frozen weight: (N, K)."""
        return self.group.weights[self._index]

    def forward(self, x: Tensor) -> Tensor:
        """The frozen map and the adapters of the rows."""
        return self.group.member_output(self._index, x)
