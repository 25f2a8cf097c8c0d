"""Gated MLPs: down(act(gate(x)) * up(x)), where gate and up are one product.

Shape letters: I inner width; `...` rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tinkex.nn.linear import GroupMember, LinearGroup
from tinkex.nn.native import rows
from tinkex.nn.native.library import LANES

_aten = torch.ops.aten


class _Pull(Protocol):
    def __call__(self, dy: Tensor, x: Tensor, *, grad_input: Tensor) -> Tensor: ...


class Activation(NamedTuple):
    """A function of numbers, and its way back into memory that is there."""

    run: Callable[[Tensor], Tensor]
    pull: _Pull


def _silu(x: Tensor) -> Tensor:
    return nn.functional.silu(x)


def _gelu(approximate: str) -> Activation:
    return Activation(
        partial(nn.functional.gelu, approximate=approximate),
        partial(_aten.gelu_backward.grad_input, approximate=approximate),
    )


ACTIVATIONS = (
    Activation(_silu, _aten.silu_backward.grad_input),
    _gelu("tanh"),
    _gelu("none"),
)


class GatedMlp(nn.Module):
    """Stands where a gated MLP stood."""

    def __init__(self, into: LinearGroup, out: LinearGroup, activation: Activation) -> None:
        super().__init__()
        self.into, self.out = into, out
        self._activation = activation

    @property
    def is_silu(self) -> bool:
        """Whether it gates by silu, as nearly all do."""
        return self._activation.run is _silu

    def forward(self, x: Tensor) -> Tensor:
        """What the MLP makes of its input."""
        both = self.into.outputs(x)
        if torch.is_grad_enabled() and both.requires_grad:
            inner = _Gated.apply(both, self._activation)  # type: ignore[no-untyped-call]
        elif self.is_silu and both.shape[-1] % (2 * LANES) == 0 and rows.are_suited(both):
            inner = rows.gated(both)
        else:
            gate, up = both.chunk(2, dim=-1)
            inner = self._activation.run(gate).mul_(up)
        return self.out.outputs(inner)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(both)
        ctx.activation = activation
        gate, up = both.chunk(2, dim=-1)
        return activation.run(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        # Both halves are written where they belong; autograd would join them afterwards.
        dboth = torch.empty_like(both)
        dgate, dup = dboth.chunk(2, dim=-1)
        torch.mul(ctx.activation.run(gate), dy, out=dup)
        ctx.activation.pull(dy * up, gate, grad_input=dgate)
        return dboth, None


def mlp_twins(module: nn.Module) -> list[GatedMlp]:
    """What may compute the same as a module, if it looks like a gated MLP."""
    children = dict(module.named_children())
    out = children.pop("down_proj", None)
    maps = [child for child in children.values() if isinstance(child, GroupMember)]
    if not isinstance(out, GroupMember) or not maps:
        return []
    into = maps[0].group
    is_gated = all(one.group is into for one in maps) and len(into.sizes) == len(maps)
    if not is_gated or sum(into.sizes) != 2 * out.in_features or len(set(into.sizes)) != 1:
        return []
    return [GatedMlp(into, out.group, activation) for activation in ACTIVATIONS]
