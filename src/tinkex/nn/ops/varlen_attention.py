"""The kernels of `attention_varlen.c`: causal attention over documents that lie end to end.

Shape letters: T tokens, H query heads, G key heads, K head width, D documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tinkex.nn.ops.training_kernels import (
    call_kernel,
    can_use_training_kernels,
    load_training_kernels,
)

#: Columns that the kernels take at a time.
_PANEL_WIDTH = 16


class PackedDocuments:
    """Where documents begin, for the kernels."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.max_length = max(lengths)
        self.num_documents = len(lengths)
        starts = torch.zeros(self.num_documents + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0, out=starts[1:])
        self.cumulative_lengths = starts

    def kernel_args(
        self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, scale: float
    ) -> tuple[Any, ...]:
        """What both kernels begin with."""
        rows = (part for one in (q_THK, k_TGK, v_TGK) for part in (one, one.stride(0)))
        return (
            *(*rows, self.cumulative_lengths, self.num_documents),
            *(q_THK.shape[1], k_TGK.shape[1], q_THK.shape[2], scale),
        )

    def allocate_scratch(self, like_THK: Tensor) -> tuple[Tensor, int]:
        """Memory for every thread, and how much of it each has."""
        found = load_training_kernels()
        assert found is not None
        size = int(found.varlen_attention_scratch(self.max_length, like_THK.shape[-1]))
        return like_THK.new_empty(torch.get_num_threads(), size), size


def can_use_varlen_kernel(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> bool:
    """Whether the kernels read these; values may be a part of wider rows."""
    has_heads = v_TGK.stride()[1:] == (v_TGK.shape[2], 1) and v_TGK.dtype == torch.float32
    return (
        has_heads and q_THK.shape[-1] % _PANEL_WIDTH == 0 and can_use_training_kernels(q_THK, k_TGK)
    )


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
        told, scratch = (
            documents.kernel_args(q_THK, k_TGK, v_TGK, scale),
            documents.allocate_scratch(q_THK),
        )
        call_kernel("varlen_attention_forward", *told, out_THK, lse_TH, *scratch)
        ctx.save_for_backward(q_THK, k_TGK, v_TGK, out_THK, lse_TH)
        ctx.documents, ctx.scale = documents, scale
        return out_THK

    @staticmethod
    def backward(ctx: Any, dout_THK: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_THK, k_TGK, v_TGK, out_THK, lse_TH = ctx.saved_tensors
        dq_THK, dk_TGK = torch.empty_like(q_THK), torch.empty_like(k_TGK)
        dv_TGK = torch.empty_like(k_TGK)
        told = ctx.documents.kernel_args(q_THK, k_TGK, v_TGK, ctx.scale)
        call_kernel(
            *("varlen_attention_backward", *told, out_THK, lse_TH, dout_THK.contiguous()),
            *(dq_THK, dk_TGK, dv_TGK, *ctx.documents.allocate_scratch(q_THK)),
        )
        return dq_THK, dk_TGK, dv_TGK, None, None


def varlen_attention(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: PackedDocuments, scale: float
) -> Tensor:
    """What each token finds in its own document, at itself and before."""
    inputs = (q_THK, k_TGK, v_TGK, documents, scale)
    out_THK: Tensor = _VarlenAttentionFunction.apply(*inputs)  # type: ignore[no-untyped-call]
    return out_THK
