"""Attention of decode steps: each sequence adds one token to its KV cache and attends to all.

Shape letters: N sequences, H query heads, G key heads, C token capacity of a slot, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.nn.forward_context import AttentionOptions
from tinkex.nn.ops.kernel_calls import call_kernel
from tinkex.nn.ops.library import LANES, load_kernels

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
