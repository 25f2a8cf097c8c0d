"""Fused training forward pass over packed documents, with the weights of a transformers model.

QKV and gate/up projections are fused; positions restart with each document and attention stays
within it. The result equals the forward pass of transformers.

Shape letters: T tokens, D hidden size, H query heads, G key/value heads, K head size, E experts.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinkex.nn.forward_context import AttentionOptions
from tinkex.nn.ops import attention as native
from tinkex.nn.ops.rms_norm import add_rms_norm, rms_norm
from tinkex.nn.ops.rotary import QKRotary, split_qkv_rotary
from tinkex.nn.ops.swiglu import swiglu
from tinkex.nn.packed_attention import PackedAttention
from tinkex.pipeline.model import is_moe


class HiddenStates(NamedTuple):
    """Output of the decoder layers."""

    states_TD: Tensor
    """After the final norm."""
    router_aux_loss: Tensor | None
    """Load-balancing loss times its coefficient; None without experts."""


class PackedForward:
    """Runs a model on concatenated documents."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
        self._model: Any = model
        self._dtype = dtype
        self._cos_sin: tuple[Tensor, Tensor] | None = None
        self._has_experts = is_moe(model.config)
        retain_freed_memory()

    @property
    def head_VD(self) -> Tensor:
        """Weight of the LM head."""
        weight: Tensor = self._model.lm_head.weight
        return weight

    def __call__(self, tokens_T: Tensor, lengths: Sequence[int]) -> HiddenStates:
        """Compute the hidden states of all tokens."""
        inner = self._model.model
        cos_sin = self._rotary_tables(lengths, tokens_T.device)
        attention = _DocumentAttention(lengths)
        x_TD = inner.embed_tokens(tokens_T).to(self._dtype)
        h_TD = _rms_norm(inner.layers[0].input_layernorm, x_TD)
        router_logits: list[Tensor] = []
        # Fuse each norm with the preceding residual add: the next layer's norm, or the final one.
        next_norms = [*(layer.input_layernorm for layer in inner.layers[1:]), inner.norm]
        for layer, norm in zip(inner.layers, next_norms, strict=True):
            delta_TD = self._attend(layer.self_attn, h_TD, cos_sin, attention)
            x_TD, h_TD = _add_rms_norm(layer.post_attention_layernorm, x_TD, delta_TD)
            if hasattr(layer.mlp, "experts"):
                delta_TD, logits_TE = _moe_forward(layer.mlp, h_TD)
                router_logits.append(logits_TE)
            else:
                delta_TD = _mlp(layer.mlp, h_TD)
            x_TD, h_TD = _add_rms_norm(norm, x_TD, delta_TD)
        return HiddenStates(h_TD, self._router_aux_loss(router_logits))

    def _attend(
        self, attn: Any, h_TD: Tensor, cos_sin: tuple[Tensor, Tensor], attention: _DocumentAttention
    ) -> Tensor:
        qkv_T = _fused_linear(h_TD, attn.q_proj, attn.k_proj, attn.v_proj)
        qkv = split_qkv_rotary(
            qkv_T.unflatten(-1, (-1, attn.head_dim)), _rotary_inputs(attn, h_TD, cos_sin)
        )
        return _fused_linear(attention(*qkv, attn.scaling).flatten(1), attn.o_proj)

    def _rotary_tables(self, lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cos and sin tables of all positions, (T, 1, K / 2); cached."""
        longest = max(lengths)
        if self._cos_sin is None or len(self._cos_sin[0]) < longest:
            at = torch.arange(max(longest, 512), device=device)[None]
            like = torch.empty(0, dtype=torch.float32, device=device)
            # Both halves of a head have the same angles.
            self._cos_sin = tuple(
                x[0].chunk(2, -1)[0] for x in self._model.model.rotary_emb(like, at)
            )
        at_T = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))
        cos, sin = (table[at_T.to(device)].to(self._dtype) for table in self._cos_sin)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def _router_aux_loss(self, router_logits: Sequence[Tensor]) -> Tensor | None:
        """Load-balancing loss: num_experts * sum(fraction of tokens * mean router probability)."""
        if not router_logits:
            return None
        config = self._model.config
        probs_TE = torch.softmax(torch.cat(list(router_logits)).float(), dim=-1)
        chosen = probs_TE.topk(config.num_experts_per_tok, dim=-1).indices
        fraction_E = torch.bincount(chosen.flatten(), minlength=probs_TE.shape[-1]) / len(probs_TE)
        product = (fraction_E * probs_TE.mean(dim=0)).sum() * probs_TE.shape[-1]
        return product * float(config.router_aux_loss_coef)


class _DocumentAttention:
    """Attention within each document: the C kernel, or torch where it does not apply."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._documents, self._packed = native.PackedDocuments(lengths), PackedAttention(lengths)

    def __call__(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, scaling: float) -> Tensor:
        if native.can_use_varlen_kernel(q_THK, k_TGK, v_TGK):
            return native.varlen_attention(q_THK, k_TGK, v_TGK, self._documents, scaling)
        q_HTK, k_GTK, v_GTK = (x.transpose(0, 1) for x in (q_THK, k_TGK, v_TGK))
        return self._packed.attend(0, q_HTK, k_GTK, v_GTK, AttentionOptions(scaling))


def _rms_norm(norm: Any, x_TD: Tensor) -> Tensor:
    return rms_norm(x_TD, norm.weight.to(x_TD.dtype), norm.variance_epsilon)


def _add_rms_norm(norm: Any, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x_TD, delta_TD, norm.weight.to(x_TD.dtype), norm.variance_epsilon)


def _rotary_inputs(attn: Any, h_TD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> QKRotary:
    has_norms = hasattr(attn, "q_norm")
    return QKRotary(
        attn.q_proj.out_features // attn.head_dim,
        attn.k_proj.out_features // attn.head_dim,
        attn.q_norm.variance_epsilon if has_norms else 0.0,
        *cos_sin,
        attn.q_norm.weight.to(h_TD.dtype) if has_norms else None,
        attn.k_norm.weight.to(h_TD.dtype) if has_norms else None,
    )


def _fused_linear(x_TD: Tensor, *linears: nn.Linear) -> Tensor:
    """Apply several linear layers as one matmul; concatenating the weights is cheap."""
    if len(linears) == 1:
        (only,) = linears
        bias = None if only.bias is None else only.bias.to(x_TD.dtype)
        return nn.functional.linear(x_TD, only.weight.to(x_TD.dtype), bias)
    weights: list[Tensor] = [linear.weight for linear in linears]
    weight = torch.cat(weights).to(x_TD.dtype)
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return nn.functional.linear(x_TD, weight, torch.cat(biases).to(x_TD.dtype) if biases else None)


def _mlp(mlp: Any, h_TD: Tensor) -> Tensor:
    return _fused_linear(swiglu(_fused_linear(h_TD, mlp.gate_proj, mlp.up_proj)), mlp.down_proj)


def _moe_forward(mlp: Any, h_TD: Tensor) -> tuple[Tensor, Tensor]:
    logits_TE, scores, chosen = mlp.gate(h_TD)
    return mlp.experts(h_TD, chosen, scores), logits_TE


#: Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = (1 << 31) - 1
#: The maximum that glibc accepts; larger tensors are still mapped and unmapped.
_MAX_MMAP_THRESHOLD = 1 << 25


@cache
def retain_freed_memory() -> bool:
    """Make malloc keep freed memory, because the next update needs it again.

    Page faults on fresh memory cost more than most of the computation on it. Returns True if
    the C library supports it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD) and mallopt(_TRIM_THRESHOLD, _NEVER_TRIM)
    )
