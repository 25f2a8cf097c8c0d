"""Attention with C kernels: over packed documents in training, and of decode steps.

Shape letters: T tokens, N sequences, H query heads, G key heads, K or D head width, C token
capacity of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.nn.forward_context import AttentionOptions
from tinkex.nn.ops.autograd import FunctionContext, call_kernel, can_use_kernels
from tinkex.nn.ops.library import LANES, load_kernels

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
        ctx: FunctionContext[tuple[PackedDocuments, float]],
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
        ctx.state = documents, scale
        return out_THK

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[PackedDocuments, float]], dout_THK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        documents, scale = ctx.state
        q_THK, k_TGK, v_TGK, out_THK, lse_TH = ctx.saved_tensors
        dq_THK, dk_TGK = torch.empty_like(q_THK), torch.empty_like(k_TGK)
        dv_TGK = torch.empty_like(k_TGK)
        args = documents.kernel_args(q_THK, k_TGK, v_TGK, scale)
        call_kernel(
            "varlen_attention_backward",
            *(*args, out_THK, lse_TH, dout_THK.contiguous()),
            *(dq_THK, dk_TGK, dv_TGK, *documents.allocate_scratch(q_THK)),
        )
        return dq_THK, dk_TGK, dv_TGK, None, None


# --- decode steps: each sequence adds one token to its KV cache and attends to all --------------


#: Widest head that the kernel accepts (MAX_HEAD_DIM in `attention_decode.c`).
MAX_HEAD_DIM = 256


def can_use_decode_kernel(tensors: Sequence[Tensor], options: AttentionOptions) -> bool:
    """Whether the kernel supports this attention; the last dimension of each tensor is a width."""
    widths = [x.shape[-1] for x in tensors]
    return (
        options.softcap is None
        and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
        and all(width % LANES == 0 and width <= MAX_HEAD_DIM for width in widths)
        and load_kernels() is not None
    )


def decode_attention(
    new_qkv: tuple[Tensor, Tensor, Tensor],
    keys_NGCD: Tensor,
    values_NGCD: Tensor,
    lengths_pointer: int,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Append the new keys and values to the cache and attend; returns (N, H, D) and LSE (N, H).

    `new_qkv` has heads first. `lengths_pointer` is the address of N int64 with the number of tokens
    that each slot held before this step.
    """
    q_HND, k_GND, v_GND = (x if x.stride(-1) == 1 else x.contiguous() for x in new_qkv)
    num_heads, num_rows, key_width = q_HND.shape
    num_kv_heads, _, value_width = v_GND.shape
    out_NHD = q_HND.new_empty(num_rows, num_heads, value_width)
    lse_NH = q_HND.new_empty(num_rows, num_heads)
    call_kernel(
        *("decode_attention", q_HND, q_HND.stride(1), q_HND.stride(0)),
        *(k_GND, k_GND.stride(1), k_GND.stride(0), v_GND, v_GND.stride(1), v_GND.stride(0)),
        *(keys_NGCD, values_NGCD, lengths_pointer),
        *(options.window or 0, keys_NGCD.shape[2], num_rows),
        *(num_kv_heads, num_heads // num_kv_heads, key_width, value_width),
        *(options.scaling, out_NHD, lse_NH),
    )
    return out_NHD, lse_NH
