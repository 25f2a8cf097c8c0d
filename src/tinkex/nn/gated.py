"""Gated MLPs: down(act(gate(x)) * up(x)), where gate and up are one product.

Shape letters: I inner width; `...` rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tinkex.nn.linear import MergedLinearPart, MergedLoraLinear
from tinkex.nn.native import rows
from tinkex.nn.native.library import LANES

_aten = torch.ops.aten


class _ActivationBackward(Protocol):
    def __call__(self, dy: Tensor, x: Tensor, *, grad_input: Tensor) -> Tensor: ...


class GateActivation(NamedTuple):
    """A function of numbers, and its way back into memory that is there."""

    forward: Callable[[Tensor], Tensor]
    backward: _ActivationBackward


def _silu(x: Tensor) -> Tensor:
    return nn.functional.silu(x)


def _gelu(approximate: str) -> GateActivation:
    return GateActivation(
        partial(nn.functional.gelu, approximate=approximate),
        partial(_aten.gelu_backward.grad_input, approximate=approximate),
    )


ACTIVATIONS = (
    GateActivation(_silu, _aten.silu_backward.grad_input),
    _gelu("tanh"),
    _gelu("none"),
)


class FusedGatedMLP(nn.Module):
    """Stands where a gated MLP stood."""

    def __init__(
        self,
        gate_up_proj: MergedLoraLinear,
        down_proj: MergedLoraLinear,
        activation: GateActivation,
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self._activation = activation

    @property
    def is_silu(self) -> bool:
        """Whether it gates by silu, as nearly all do."""
        return self._activation.forward is _silu

    def forward(self, x: Tensor) -> Tensor:
        """What the MLP makes of its input."""
        both = self.gate_up_proj.merged_output(x)
        if torch.is_grad_enabled() and both.requires_grad:
            inner = _GatedActivationFunction.apply(both, self._activation)  # type: ignore[no-untyped-call]
        elif self.is_silu and both.shape[-1] % (2 * LANES) == 0 and rows.can_use_kernels(both):
            inner = rows.swiglu_rows(both)
        else:
            gate, up = both.chunk(2, dim=-1)
            inner = self._activation.forward(gate).mul_(up)
        return self.down_proj.merged_output(inner)


class _GatedActivationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: GateActivation) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        gate, up = gate_up.chunk(2, dim=-1)
        return activation.forward(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        # Both halves are written where they belong; autograd would join them afterwards.
        dboth = torch.empty_like(both)
        dgate, dup = dboth.chunk(2, dim=-1)
        torch.mul(ctx.activation.forward(gate), dy, out=dup)
        ctx.activation.backward(dy * up, gate, grad_input=dgate)
        return dboth, None


def mlp_candidates(module: nn.Module) -> list[FusedGatedMLP]:
    """What may compute the same as a module, if it looks like a gated MLP."""
    children = dict(module.named_children())
    out = children.pop("down_proj", None)
    maps = [child for child in children.values() if isinstance(child, MergedLinearPart)]
    if not isinstance(out, MergedLinearPart) or not maps:
        return []
    into = maps[0].group
    is_gated = all(one.group is into for one in maps) and len(into.sizes) == len(maps)
    if not is_gated or sum(into.sizes) != 2 * out.in_features or len(set(into.sizes)) != 1:
        return []
    return [FusedGatedMLP(into, out.group, activation) for activation in ACTIVATIONS]
