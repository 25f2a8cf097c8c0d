"""Attention with rotated positions: one product for q, k and v; q and k are turned together.

A head's two halves are the parts of complex numbers, which are turned by each row's angles.

Shape letters: T rows, N all heads, H query heads, G key heads, A heads that are turned (H + G),
D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tinkex.nn.forward_context import AttentionOptions, active_forward
from tinkex.nn.lora_linear import MergedLinearPart, MergedLoraLinear
from tinkex.nn.ops import inference_kernels
from tinkex.nn.ops.library import LANES
from tinkex.nn.ops.rms_norm import FrozenRMSNorm


class _RotaryAngles(NamedTuple):
    """The angles of a pass."""

    cos_T1D: Tensor
    sin_T1D: Tensor
    """Negative for a head's first half."""

    def apply(self, x_TAD: Tensor) -> Tensor:
        half = x_TAD.shape[-1] // 2
        return (x_TAD * self.cos_T1D).addcmul_(x_TAD.roll(half, -1), self.sin_T1D)

    def backward(self, dy_TAD: Tensor) -> Tensor:
        half = dy_TAD.shape[-1] // 2
        return (dy_TAD * self.sin_T1D).roll(half, -1).addcmul_(dy_TAD, self.cos_T1D)


def _cached_angles(saved: dict[object, Any], embeddings: tuple[Tensor, Tensor]) -> _RotaryAngles:
    """The angles, read once for all layers that are given the same."""
    cos, sin = embeddings
    found = saved.get(_RotaryAngles)
    if found is None or found[0] is not cos:
        first, second = sin[0].unsqueeze(1).chunk(2, dim=-1)
        found = cos, _RotaryAngles(cos[0].unsqueeze(1), torch.cat((-first, second), dim=-1))
        saved[_RotaryAngles] = found
    turn: _RotaryAngles = found[1]
    return turn


class HeadLayout(NamedTuple):
    """How many heads there are of each kind, and what is done to them before they are turned."""

    num_query_heads: int
    num_kv_heads: int
    norm: FrozenRMSNorm | None

    @property
    def sizes(self) -> list[int]:
        return [self.num_query_heads, self.num_kv_heads, self.num_kv_heads]


class FusedAttention(nn.Module):
    """Stands where a module of attention stood."""

    def __init__(
        self,
        qkv_proj: MergedLoraLinear,
        o_proj: MergedLoraLinear,
        original: nn.Module,
        options: AttentionOptions,
    ) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj, self.options = qkv_proj, o_proj, options
        self.head_dim = int(original.head_dim)  # type: ignore[arg-type]
        self.layer_idx = int(original.layer_idx)  # type: ignore[arg-type]
        num_queries = o_proj.in_features // self.head_dim
        num_keys = (sum(qkv_proj.sizes) // self.head_dim - num_queries) // 2
        self.head_layout = HeadLayout(
            num_queries, num_keys, _merge_qk_norms(original, num_queries, num_keys)
        )

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        """As transformers calls it: (1, T, width) in and out."""
        run = active_forward()
        y_T = self.qkv_proj.merged_output(hidden_states[0])
        y_TND = y_T.view(y_T.shape[0], -1, self.head_dim)
        turn = _cached_angles(run.saved, position_embeddings)
        if torch.is_grad_enabled() and y_TND.requires_grad:
            parts = _SplitRotaryFunction.apply(y_TND, self.head_layout, turn)  # type: ignore[no-untyped-call]
        else:
            parts = _split_rotary_inplace(y_TND, self.head_layout, turn)
        q_HTD, k_GTD, v_GTD = (part.transpose(0, 1) for part in parts)
        out_THD = run.context.attention.attend(self.layer_idx, q_HTD, k_GTD, v_GTD, self.options)
        return self.o_proj.merged_output(out_THD.flatten(1)).unsqueeze(0), None


def _split_rotary(
    y_TND: Tensor, head_layout: HeadLayout, angles: _RotaryAngles
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Turned queries and keys, and values; and the size of each head if it was normed."""
    num_turned = head_layout.num_query_heads + head_layout.num_kv_heads
    x_TAD, size_TA1 = y_TND[:, :num_turned], None
    if head_layout.norm is not None:
        x_TAD, size_TA1 = head_layout.norm.normalize(x_TAD)
    qk_TAD = angles.apply(x_TAD)
    parts = (
        qk_TAD[:, : head_layout.num_query_heads],
        qk_TAD[:, head_layout.num_query_heads :],
        y_TND[:, num_turned:],
    )
    return parts, size_TA1


def _split_rotary_inplace(
    y_TND: Tensor, head_layout: HeadLayout, angles: _RotaryAngles
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where nothing is differentiated; the input is used up."""
    width = y_TND.shape[-1]
    is_whole = width % (2 * LANES) == 0 and angles.cos_T1D.shape[-1] == width
    if not is_whole or not inference_kernels.can_use_kernels(y_TND, *angles):
        return _split_rotary(y_TND, head_layout, angles)[0]
    num_turned = head_layout.num_query_heads + head_layout.num_kv_heads
    norm = None if head_layout.norm is None else (head_layout.norm.scale, head_layout.norm.eps_sum)
    inference_kernels.rotary_inplace(y_TND, num_turned, norm, (angles.cos_T1D, angles.sin_T1D))
    q_THD, k_TGD, v_TGD = y_TND.split(head_layout.sizes, dim=1)
    return q_THD, k_TGD, v_TGD


class _SplitRotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_TND: Tensor, head_layout: HeadLayout, angles: _RotaryAngles
    ) -> tuple[Tensor, ...]:
        parts, size_TA1 = _split_rotary(y_TND, head_layout, angles)
        ctx.save_for_backward(y_TND if head_layout.norm is not None else None, size_TA1, *angles)
        ctx.heads = head_layout
        return parts

    @staticmethod
    def backward(
        ctx: Any, dq_THD: Tensor, dk_TGD: Tensor, dv_TGD: Tensor
    ) -> tuple[Tensor, None, None]:
        y_TND, size_TA1, *turn = ctx.saved_tensors
        dx_TAD = _RotaryAngles(*turn).backward(torch.cat((dq_THD, dk_TGD), dim=1))
        if y_TND is not None:
            x_TAD = y_TND[:, : dx_TAD.shape[1]]
            dx_TAD = ctx.heads.norm.backward(x_TAD, size_TA1, dx_TAD)
        return torch.cat((dx_TAD, dv_TGD), dim=1), None, None


def _merge_qk_norms(original: nn.Module, num_queries: int, num_keys: int) -> FrozenRMSNorm | None:
    q_norm, k_norm = getattr(original, "q_norm", None), getattr(original, "k_norm", None)
    if not isinstance(q_norm, FrozenRMSNorm) or not isinstance(k_norm, FrozenRMSNorm):
        return None
    weights = q_norm.weight.expand(num_queries, -1), k_norm.weight.expand(num_keys, -1)
    return FrozenRMSNorm(torch.cat(weights), q_norm.eps)


def attention_candidates(module: nn.Module, options: AttentionOptions) -> list[FusedAttention]:
    """What may compute the same as a module, if it looks like attention with turned positions."""
    children = dict(module.named_children())
    out = children.pop("o_proj", None)
    maps = [child for child in children.values() if isinstance(child, MergedLinearPart)]
    if not isinstance(out, MergedLinearPart) or not maps or not hasattr(module, "head_dim"):
        return []
    into = maps[0].group
    is_plain = all(one.group is into for one in maps) and len(into.sizes) == len(maps)
    norms = [norm for norm in children.values() if isinstance(norm, FrozenRMSNorm)]
    has_odd_norm = any(norm.weight.shape[-1] != module.head_dim for norm in norms)
    if not is_plain or has_odd_norm or len({norm.eps for norm in norms}) > 1:
        return []
    return [FusedAttention(into, out.group, module, options)]


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
        elif (
            self.is_silu
            and both.shape[-1] % (2 * LANES) == 0
            and inference_kernels.can_use_kernels(both)
        ):
            inner = inference_kernels.swiglu_rows(both)
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
