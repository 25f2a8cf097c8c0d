"""Fused replacements for attention and gated MLP modules.

Attention uses one merged QKV projection and one rotary call for queries and keys; the MLP uses one
merged gate and up projection.

Shape letters: T token positions, N all heads, H query heads, G key heads, K head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tinkex.nn.forward_context import AttentionOptions, active_forward
from tinkex.nn.lora_linear import MergedLinearPart, MergedLoraLinear
from tinkex.nn.ops.rms_norm import FrozenRMSNorm
from tinkex.nn.ops.rotary import HeadLayout, RotaryAngles, signed_sin, split_frozen_qkv_rotary
from tinkex.nn.ops.swiglu import (
    ACTIVATIONS,
    SILU,
    GateActivation,
    gated_activation,
    gated_activation_inference,
)


class FusedAttention(nn.Module):
    """Replacement for a self-attention module with RoPE."""

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
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: object
    ) -> tuple[Tensor, None]:
        """Attend with the active backend; transformers calls this with (1, T, width)."""
        run = active_forward()
        qkv_T = self.qkv_proj.merged_output(hidden_states[0])
        qkv_TNK = qkv_T.view(qkv_T.shape[0], -1, self.head_dim)
        angles = _cached_angles(run.saved, position_embeddings)
        parts = split_frozen_qkv_rotary(qkv_TNK, self.head_layout, angles)
        q_HTK, k_GTK, v_GTK = (part.transpose(0, 1) for part in parts)
        out_THK = run.context.attention.attend(self.layer_idx, q_HTK, k_GTK, v_GTK, self.options)
        return self.o_proj.merged_output(out_THK.flatten(1)).unsqueeze(0), None


class _CachedAngles(NamedTuple):
    cos: Tensor
    angles: RotaryAngles


def _cached_angles(saved: dict[object, object], embeddings: tuple[Tensor, Tensor]) -> RotaryAngles:
    """The angles in the form of the rotary op, converted once for all layers of a pass."""
    cos, sin = embeddings
    cached = saved.get(_CachedAngles)
    if not isinstance(cached, _CachedAngles) or cached.cos is not cos:
        angles = RotaryAngles(cos[0].unsqueeze(1), signed_sin(sin[0].unsqueeze(1)))
        cached = saved[_CachedAngles] = _CachedAngles(cos, angles)
    return cached.angles


def _merge_qk_norms(original: nn.Module, num_queries: int, num_keys: int) -> FrozenRMSNorm | None:
    q_norm, k_norm = getattr(original, "q_norm", None), getattr(original, "k_norm", None)
    if not isinstance(q_norm, FrozenRMSNorm) or not isinstance(k_norm, FrozenRMSNorm):
        return None
    weights = q_norm.weight.expand(num_queries, -1), k_norm.weight.expand(num_keys, -1)
    return FrozenRMSNorm(torch.cat(weights), q_norm.eps)


def attention_candidates(module: nn.Module, options: AttentionOptions) -> list[FusedAttention]:
    """Fused modules that may be equivalent; none if this does not look like RoPE attention."""
    children = dict(module.named_children())
    out = children.pop("o_proj", None)
    linears = [child for child in children.values() if isinstance(child, MergedLinearPart)]
    if not isinstance(out, MergedLinearPart) or not linears or not hasattr(module, "head_dim"):
        return []
    qkv = linears[0].group
    is_merged = all(one.group is qkv for one in linears) and len(qkv.sizes) == len(linears)
    norms = [norm for norm in children.values() if isinstance(norm, FrozenRMSNorm)]
    has_odd_norm = any(norm.weight.shape[-1] != module.head_dim for norm in norms)
    if not is_merged or has_odd_norm or len({norm.eps for norm in norms}) > 1:
        return []
    return [FusedAttention(qkv, out.group, module, options)]


class FusedGatedMLP(nn.Module):
    """Replacement for a gated MLP."""

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
        """Whether this is a SwiGLU MLP."""
        return self._activation is SILU

    def forward(self, x: Tensor) -> Tensor:
        """Return down_proj(activation(gate) * up)."""
        gate_up = self.gate_up_proj.merged_output(x)
        if torch.is_grad_enabled() and gate_up.requires_grad:
            inner = gated_activation(gate_up, self._activation)
        else:
            inner = gated_activation_inference(gate_up, self._activation)
        return self.down_proj.merged_output(inner)


def mlp_candidates(module: nn.Module) -> list[FusedGatedMLP]:
    """Fused modules that may be equivalent; none if this does not look like a gated MLP."""
    children = dict(module.named_children())
    out = children.pop("down_proj", None)
    linears = [child for child in children.values() if isinstance(child, MergedLinearPart)]
    if not isinstance(out, MergedLinearPart) or not linears:
        return []
    gate_up = linears[0].group
    is_merged = all(one.group is gate_up for one in linears)
    if not is_merged or len(gate_up.sizes) != len(linears):
        return []
    if sum(gate_up.sizes) != 2 * out.in_features or len(set(gate_up.sizes)) != 1:
        return []
    return [FusedGatedMLP(gate_up, out.group, activation) for activation in ACTIVATIONS]
