"""Attention of samples that each add one token, by our own kernel.

Shape letters: N samples, H query heads, G key heads, C tokens of a slot, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.nn.forward_context import AttentionOptions
from tinkex.nn.ops.library import LANES, load_kernels

#: The kernel takes heads up to a size.
MAX_HEAD_DIM = 256


def can_use_decode_kernel(tensors: Sequence[Tensor], options: AttentionOptions) -> bool:
    """Whether the kernel computes this attention; all tensors have their widths last."""
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
    """Keep new keys and values, and see: (N, H, D), and the logarithms of total weights, (N, H).

    `new` is queries, keys and values, heads first. `lengths` is where it is written how many tokens
    each slot holds before.
    """
    found = load_kernels()
    assert found is not None
    q_HND, k_GND, v_GND = (_contiguous_heads(x) for x in new_qkv)
    num_heads, num_rows, key_width = q_HND.shape
    num_key_heads, _, value_width = v_GND.shape
    out_NHD = q_HND.new_empty(num_rows, num_heads, value_width)
    totals_NH = q_HND.new_empty(num_rows, num_heads)
    found.decode_attention(
        *(q_HND.data_ptr(), q_HND.stride(1), q_HND.stride(0)),
        *(k_GND.data_ptr(), k_GND.stride(1), k_GND.stride(0)),
        *(v_GND.data_ptr(), v_GND.stride(1), v_GND.stride(0)),
        *(keys_NGCD.data_ptr(), values_NGCD.data_ptr(), lengths_pointer),
        *(options.window or 0, keys_NGCD.shape[2], num_rows),
        *(num_key_heads, num_heads // num_key_heads, key_width, value_width),
        *(options.scaling, out_NHD.data_ptr(), totals_NH.data_ptr(), torch.get_num_threads()),
    )
    return out_NHD, totals_NH


def _contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
