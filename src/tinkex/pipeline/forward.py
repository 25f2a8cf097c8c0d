"""The training pass: transformers' weights, with fewer and larger steps over packed documents.

Queries, keys and values are one product, gate and up another; positions restart with each
document, and no document sees another. What comes out equals transformers' own forward.

Shape letters: T tokens, D hidden width, H query heads, G key heads, K head width, E experts.
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
from tinkex.nn.ops import varlen_attention as native
from tinkex.nn.ops.rms_norm import add_rms_norm, rms_norm
from tinkex.nn.ops.rotary import QKRotary, split_qkv_rotary
from tinkex.nn.ops.swiglu import swiglu
from tinkex.nn.packed_attention import PackedAttention
from tinkex.pipeline.model import is_moe


class HiddenStates(NamedTuple):
    """What the layers make of tokens."""

    states_TD: Tensor
    """Ready for the head."""
    router_aux_loss: Tensor | None
    """How unevenly experts are used, times its coefficient; None without experts."""


class PackedForward:
    """Runs a model over documents that lie end to end."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
        self._model: Any = model
        self._dtype = dtype
        self._cos_sin: tuple[Tensor, Tensor] | None = None
        self._has_experts = is_moe(model.config)
        retain_freed_memory()

    @property
    def head_VD(self) -> Tensor:
        """The weight that makes logits of hidden states."""
        weight: Tensor = self._model.lm_head.weight
        return weight

    def __call__(self, tokens_T: Tensor, lengths: Sequence[int]) -> HiddenStates:
        """Hidden states of all tokens."""
        inner = self._model.model
        angles = self._rotary_tables(lengths, tokens_T.device)
        attention = _DocumentAttention(lengths)
        x_TD = inner.embed_tokens(tokens_T).to(self._dtype)
        h_TD = _rms_norm(inner.layers[0].input_layernorm, x_TD)
        routed: list[Tensor] = []
        # Each norm is taken together with the sum before it: that of the next layer, or the last.
        following = [*(layer.input_layernorm for layer in inner.layers[1:]), inner.norm]
        for layer, norm in zip(inner.layers, following, strict=True):
            delta_TD = self._attend(layer.self_attn, h_TD, angles, attention)
            x_TD, h_TD = _add_rms_norm(layer.post_attention_layernorm, x_TD, delta_TD)
            if hasattr(layer.mlp, "experts"):
                delta_TD, logits_TE = _moe_forward(layer.mlp, h_TD)
                routed.append(logits_TE)
            else:
                delta_TD = _mlp(layer.mlp, h_TD)
            x_TD, h_TD = _add_rms_norm(norm, x_TD, delta_TD)
        return HiddenStates(h_TD, self._router_aux_loss(routed))

    def _attend(
        self, attn: Any, h_TD: Tensor, angles: tuple[Tensor, Tensor], attention: _DocumentAttention
    ) -> Tensor:
        all_T = _fused_linear(h_TD, attn.q_proj, attn.k_proj, attn.v_proj)
        parts = split_qkv_rotary(
            all_T.unflatten(-1, (-1, attn.head_dim)), _rotary_inputs(attn, h_TD, angles)
        )
        return _fused_linear(attention(*parts, attn.scaling).flatten(1), attn.o_proj)

    def _rotary_tables(self, lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, (T, 1, K / 2); the table is made once."""
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

    def _router_aux_loss(self, routed: Sequence[Tensor]) -> Tensor | None:
        """Experts times the product of how often each is chosen and how likely it was."""
        if not routed:
            return None
        config = self._model.config
        chances_TE = torch.softmax(torch.cat(list(routed)).float(), dim=-1)
        chosen = chances_TE.topk(config.num_experts_per_tok, dim=-1).indices
        share_E = torch.bincount(chosen.flatten(), minlength=chances_TE.shape[-1]) / len(chances_TE)
        product = (share_E * chances_TE.mean(dim=0)).sum() * chances_TE.shape[-1]
        return product * float(config.router_aux_loss_coef)


class _DocumentAttention:
    """Attention within each document: by our own kernel, or by torch where that is not suited."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._documents, self._packed = native.PackedDocuments(lengths), PackedAttention(lengths)

    def __call__(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, scaling: float) -> Tensor:
        if native.can_use_varlen_kernel(q_THK, k_TGK, v_TGK):
            return native.varlen_attention(q_THK, k_TGK, v_TGK, self._documents, scaling)
        q_HTK, k_GTK, v_GTK = (one.transpose(0, 1) for one in (q_THK, k_TGK, v_TGK))
        return self._packed.attend(0, q_HTK, k_GTK, v_GTK, AttentionOptions(scaling))


def _rms_norm(norm: Any, x_TD: Tensor) -> Tensor:
    return rms_norm(x_TD, norm.weight.to(x_TD.dtype), norm.variance_epsilon)


def _add_rms_norm(norm: Any, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x_TD, delta_TD, norm.weight.to(x_TD.dtype), norm.variance_epsilon)


def _rotary_inputs(attn: Any, h_TD: Tensor, angles: tuple[Tensor, Tensor]) -> QKRotary:
    has_norms = hasattr(attn, "q_norm")
    return QKRotary(
        attn.q_proj.out_features // attn.head_dim,
        attn.k_proj.out_features // attn.head_dim,
        attn.q_norm.variance_epsilon if has_norms else 0.0,
        *angles,
        attn.q_norm.weight.to(h_TD.dtype) if has_norms else None,
        attn.k_norm.weight.to(h_TD.dtype) if has_norms else None,
    )


def _fused_linear(x_TD: Tensor, *linears: nn.Linear) -> Tensor:
    """One product instead of several; to copy the weights together costs next to nothing."""
    if len(linears) == 1:
        (only,) = linears
        bias = None if only.bias is None else only.bias.to(x_TD.dtype)
        return nn.functional.linear(x_TD, only.weight.to(x_TD.dtype), bias)
    weights: list[Tensor] = [one.weight for one in linears]
    weight = torch.cat(weights).to(x_TD.dtype)
    found: list[Tensor] = [one.bias for one in linears if one.bias is not None]
    return nn.functional.linear(x_TD, weight, torch.cat(found).to(x_TD.dtype) if found else None)


def _mlp(mlp: Any, h_TD: Tensor) -> Tensor:
    return _fused_linear(swiglu(_fused_linear(h_TD, mlp.gate_proj, mlp.up_proj)), mlp.down_proj)


def _moe_forward(mlp: Any, h_TD: Tensor) -> tuple[Tensor, Tensor]:
    logits_TE, scores, chosen = mlp.gate(h_TD)
    return mlp.experts(h_TD, chosen, scores), logits_TE


#: glibc's names for what mallopt sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = (1 << 31) - 1
#: The most that glibc takes; larger tensors still come and go with system calls.
_MAX_MMAP_THRESHOLD = 1 << 25


@cache
def retain_freed_memory() -> bool:
    """Let freed memory stay in this process, for an update needs again what the last one freed.

    The system hands out fresh memory page by page, which costs more than most of what is done in
    it. True if the C library does as it is told; once is enough.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD) and mallopt(_TRIM_THRESHOLD, _NEVER_TRIM)
    )
