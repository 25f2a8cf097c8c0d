"""Frozen linear layers with LoRA: layers that read the same input are merged into one product.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tinkex.nn.forward_context import LoraRows, SavedLora, active_context, active_forward
from tinkex.nn.ops.autograd import FunctionContext
from tinkex.nn.ops.packed_matmul import PackedWeight, can_pack

#: Row counts for which oneDNN is faster with a weight in its own layout.
_FEW_ROWS = range(2, 65)


class FrozenLinear(nn.Module):
    """The merged, frozen weights of linear layers that read the same input.

    The weight is packed for the C kernels where they are available, else contiguous for torch. If
    it is `shardable`, it is a parameter of this module, which FSDP can divide among ranks.
    """

    def __init__(
        self, weight_KN: Tensor, bias_N: Tensor | None, *, shardable: bool = False
    ) -> None:
        super().__init__()
        self.shape_KN = weight_KN.shape
        self.bias_N = bias_N
        self.packed_weight = (
            PackedWeight(weight_KN) if can_pack(weight_KN) and not shardable else None
        )
        """The weight for the C kernels; None where torch runs the product."""
        self._weight_KN = None if self.packed_weight is not None else weight_KN.contiguous()
        if shardable:
            self._weight_KN = nn.Parameter(weight_KN.contiguous(), requires_grad=False)
        self._onednn_weight: Tensor | None = None

    @classmethod
    def from_modules(cls, members: Sequence[nn.Module], *, shardable: bool = False) -> FrozenLinear:
        """Merge linear modules; copies their weights transposed, which is faster to read."""
        weights = [_weight_NK(member).t() for member in members]
        weight_KN = weights[0] if len(weights) == 1 else torch.cat(weights, dim=1)
        return cls(weight_KN, _merge_biases(members), shardable=shardable)

    @property
    def weight_KN(self) -> Tensor:
        """The weight, inputs first; a copy if the weight is packed."""
        if self.packed_weight is not None:
            return self.packed_weight.weight_KN()
        assert self._weight_KN is not None
        return self._weight_KN

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight and of its copy."""
        if self.packed_weight is not None:
            return self.packed_weight.num_bytes
        num_copies = 1 if self._onednn_weight is None else 2
        return num_copies * self.weight_KN.nbytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of a second copy of the weight for oneDNN; 0 if it would not be used."""
        if self.packed_weight is not None:
            return 0
        is_plain = self.weight_KN.dtype == torch.float32 and self.weight_KN.device.type == "cpu"
        return self.weight_KN.nbytes if is_plain and torch.backends.mkldnn.is_available() else 0

    def make_copy(self) -> None:
        """Make a second copy of the weight for oneDNN, which is faster with few rows."""
        self._onednn_weight = torch.ops.mkldnn._reorder_linear_weight(
            self.weight_KN.t().contiguous()
        )

    def forward(self, x_MK: Tensor) -> Tensor:
        """Return x W + b in a new tensor; the algorithm depends only on the number of rows."""
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
        """Return dy W^T in a new tensor."""
        if self.packed_weight is not None:
            return self.packed_weight.matmul_transposed(dy_MN)
        return torch.mm(dy_MN, self.weight_KN.t())


def linear_out_features(member: nn.Module) -> int:
    """Number of outputs of a linear module."""
    return int(_weight_NK(member).shape[0])


def _weight_NK(member: nn.Module) -> Tensor:
    weight = member.weight
    assert isinstance(weight, Tensor)
    # Anything else is a transformers Conv1D, whose weight is transposed.
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
    """Frozen linear layers that read the same input, merged, with LoRA."""

    def __init__(
        self, target_index: int, members: Sequence[nn.Module], *, shardable: bool = False
    ) -> None:
        self.target_index = target_index
        self.sizes = [linear_out_features(member) for member in members]
        self.frozen = FrozenLinear.from_modules(members, shardable=shardable)
        # Autograd records a function only if an input requires a gradient; adapters are not inputs.
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return self.frozen.shape_KN[0]

    @property
    def weights(self) -> Sequence[Tensor]:
        """The members' frozen weights, each (N_i, K)."""
        return torch.split(self.frozen.weight_KN.t(), self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the frozen weights and of their copy."""
        return self.frozen.num_bytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of a second copy of the weights; 0 if it would not be used."""
        return self.frozen.copy_bytes

    def make_copy(self) -> None:
        """Make a second copy of the weights, which makes some products faster."""
        self.frozen.make_copy()

    def member_output(self, index: int, x: Tensor) -> Tensor:
        """Return one member's output; the merged output is cached until all members read it."""
        if len(self.sizes) == 1:
            return self.merged_output(x)
        saved = active_forward().saved
        cached = saved.pop(self, None)
        unread = cached.unread if isinstance(cached, _CachedOutputs) and cached.x is x else None
        output = None if unread is None else unread[index]
        if unread is None or output is None:
            parts: tuple[Tensor, ...] = self.merged_output(x).split(self.sizes, dim=-1)
            unread, output = [*parts], parts[index]
        unread[index] = None
        if any(part is not None for part in unread):
            saved[self] = _CachedOutputs(x, unread)
        return output

    def merged_output(self, x: Tensor) -> Tensor:
        """Return the outputs of all members, concatenated."""
        lora = active_context().lora
        if not torch.is_grad_enabled():
            y_MN, _ = self.forward(x.reshape(-1, x.shape[-1]), lora)
            return y_MN.view(*x.shape[:-1], -1)
        anchor = self._anchor if lora.is_trained(self.target_index) else None
        y: Tensor = _MergedLoraLinearFunction.apply(x, anchor, self, lora)  # type: ignore[no-untyped-call]
        return y

    def forward(self, x_MK: Tensor, lora: LoraRows) -> tuple[Tensor, SavedLora]:
        """Return the outputs of all members and what `backward` needs for LoRA."""
        y_MN = self.frozen.forward(x_MK)
        return y_MN, lora.add(self.target_index, x_MK, y_MN)

    def backward(
        self,
        lora: LoraRows,
        x_MK: Tensor,
        dy_MN: Tensor,
        saved: SavedLora,
        *,
        needs_input_grad: bool,
    ) -> Tensor | None:
        """Accumulate the adapters' gradients; returns the input's gradient if needed."""
        dx_MK = self.frozen.backward(dy_MN) if needs_input_grad else None
        lora.backward(self.target_index, x_MK, dy_MN, saved, dx_MK)
        return dx_MK


class _CachedOutputs(NamedTuple):
    """The merged output for an input: the parts that members have not read yet."""

    x: Tensor
    unread: list[Tensor | None]


class _MergedLoraLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[MergedLoraLinear, LoraRows, torch.Size]],
        x: Tensor,
        anchor: Tensor | None,
        group: MergedLoraLinear,
        lora: LoraRows,
    ) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        y_MN, saved = group.forward(x_MK, lora)
        # Not as attributes: activation checkpointing drops only saved tensors.
        ctx.save_for_backward(x_MK, *saved)
        ctx.state = group, lora, x.shape
        return y_MN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[MergedLoraLinear, LoraRows, torch.Size]], dy: Tensor
    ) -> tuple[Tensor | None, None, None, None]:
        group, lora, shape = ctx.state
        x_MK, *saved = ctx.saved_tensors
        dy_MN = dy.reshape(-1, dy.shape[-1])
        dx_MK = group.backward(lora, x_MK, dy_MN, saved, needs_input_grad=ctx.needs_input_grad[0])
        return (dx_MK.view(shape) if dx_MK is not None else None), None, None, None


class MergedLinearPart(nn.Module):
    """Replacement for a linear module that is part of a merged group."""

    def __init__(self, group: MergedLoraLinear, index: int) -> None:
        super().__init__()
        self.group = group
        if index == 0:
            # Makes the weights visible as parameters of the model.
            self.frozen = group.frozen
        self.in_features, self.out_features = group.in_features, group.sizes[index]
        self._index = index

    @property
    def weight(self) -> Tensor:
        """The frozen weight: (N, K)."""
        return self.group.weights[self._index]

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the frozen layer plus LoRA."""
        return self.group.member_output(self._index, x)
