"""Causal attention over documents packed end to end, with a C forward and backward.

Shape letters: T tokens, H query heads, G key heads, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tinkex.nn.ops.kernel_calls import call_kernel, can_use_kernels
from tinkex.nn.ops.library import load_kernels

#: Head widths must be multiples of this (PANEL in `kernels.h`).
_PANEL_WIDTH = 16


class PackedDocuments:
    """Document boundaries in the form the kernels read."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.max_length = max(lengths)
        self.num_documents = len(lengths)
        starts = torch.zeros(self.num_documents + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0, out=starts[1:])
        self.cumulative_lengths = starts

    def kernel_args(
        self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, scale: float
    ) -> tuple[Tensor | float, ...]:
        """Leading arguments of both kernels."""
        rows = (arg for x in (q_THK, k_TGK, v_TGK) for arg in (x, x.stride(0)))
        return (
            *(*rows, self.cumulative_lengths, self.num_documents),
            *(q_THK.shape[1], k_TGK.shape[1], q_THK.shape[2], scale),
        )

    def allocate_scratch(self, like_THK: Tensor) -> tuple[Tensor, int]:
        """Allocate working memory for all threads; returns it and the size per thread."""
        kernels = load_kernels()
        assert kernels is not None
        size = int(kernels.varlen_attention_scratch(self.max_length, like_THK.shape[-1]))
        return like_THK.new_empty(torch.get_num_threads(), size), size


def can_use_varlen_kernel(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> bool:
    """Whether the kernels accept these; values may be a slice of wider rows."""
    has_whole_heads = v_TGK.stride()[1:] == (v_TGK.shape[2], 1) and v_TGK.dtype == torch.float32
    return has_whole_heads and q_THK.shape[-1] % _PANEL_WIDTH == 0 and can_use_kernels(q_THK, k_TGK)


def varlen_attention(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: PackedDocuments, scale: float
) -> Tensor:
    """Causal attention of each token within its own document; differentiable."""
    inputs = (q_THK, k_TGK, v_TGK, documents, scale)
    out_THK: Tensor = _VarlenAttentionFunction.apply(*inputs)  # type: ignore[no-untyped-call]
    return out_THK


class _VarlenAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        documents: PackedDocuments,
        scale: float,
    ) -> Tensor:
        out_THK, lse_TH = torch.empty_like(q_THK), q_THK.new_empty(q_THK.shape[:2])
        args = documents.kernel_args(q_THK, k_TGK, v_TGK, scale)
        scratch = documents.allocate_scratch(q_THK)
        call_kernel("varlen_attention_forward", *args, out_THK, lse_TH, *scratch)
        ctx.save_for_backward(q_THK, k_TGK, v_TGK, out_THK, lse_TH)
        ctx.documents, ctx.scale = documents, scale
        return out_THK

    @staticmethod
    def backward(ctx: Any, dout_THK: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_THK, k_TGK, v_TGK, out_THK, lse_TH = ctx.saved_tensors
        dq_THK, dk_TGK = torch.empty_like(q_THK), torch.empty_like(k_TGK)
        dv_TGK = torch.empty_like(k_TGK)
        args = ctx.documents.kernel_args(q_THK, k_TGK, v_TGK, ctx.scale)
        call_kernel(
            *("varlen_attention_backward", *args, out_THK, lse_TH, dout_THK.contiguous()),
            *(dq_THK, dk_TGK, dv_TGK, *ctx.documents.allocate_scratch(q_THK)),
        )
        return dq_THK, dk_TGK, dv_TGK, None, None
