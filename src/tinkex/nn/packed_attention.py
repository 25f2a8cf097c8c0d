"""Attention in torch over packed sequences.

Shape letters: T rows, H query heads, G key heads, D head width, B sequences of one length,
L length, S visible positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tinkex.nn.forward_context import AttentionOptions


class _EqualLengthRun(NamedTuple):
    """Consecutive sequences of the same length."""

    num_sequences: int
    length: int


class PackedAttention:
    """Causal attention within each of several sequences packed end to end."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._runs = [
            _EqualLengthRun(len(list(group)), length) for length, group in groupby(lengths)
        ]
        self._sizes = [run.num_sequences * run.length for run in self._runs]

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend with one torch call per run of equal lengths."""
        if len(self._runs) == 1:
            return _attend_run(self._runs[0], q_HTD, k_GTD, v_GTD, options)
        # split() instead of slices: the backward of a slice allocates a gradient of all rows.
        parts = zip(
            self._runs,
            *(torch.split(x_HTD, self._sizes, dim=1) for x_HTD in (q_HTD, k_GTD, v_GTD)),
            strict=True,
        )
        return torch.cat([_attend_run(run, q, k, v, options) for run, q, k, v in parts])


def _attend_run(
    run: _EqualLengthRun, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, options: AttentionOptions
) -> Tensor:
    q_BHLD, k_BGLD, v_BGLD = (_unpack_run(x_HTD, run) for x_HTD in (q_HTD, k_GTD, v_GTD))
    return causal_attention(q_BHLD, k_BGLD, v_BGLD, options).transpose(1, 2).flatten(0, 1)


def _unpack_run(x_HTD: Tensor, run: _EqualLengthRun) -> Tensor:
    return torch.unflatten(x_HTD, 1, (run.num_sequences, run.length)).transpose(0, 1)


def causal_attention(
    q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, options: AttentionOptions
) -> Tensor:
    """Causal attention, limited to the window if there is one."""
    length = q_BHLD.shape[2]
    is_windowed = options.window is not None and length > options.window
    if not is_windowed and options.softcap is None:
        return nn.functional.scaled_dot_product_attention(
            q_BHLD,
            k_BGLD,
            v_BGLD,
            is_causal=True,
            scale=options.scaling,
            enable_gqa=q_BHLD.shape[1] != k_BGLD.shape[1],
        )
    position = torch.arange(length, device=q_BHLD.device)
    visible_LL = position[:, None] >= position
    if options.window is not None:
        visible_LL &= position[:, None] - position < options.window
    return masked_attention(q_BHLD, k_BGLD, v_BGLD, visible_LL, options)


def masked_attention(
    q_BHLD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, visible: Tensor, options: AttentionOptions
) -> Tensor:
    """Attention where `visible` is true, which broadcasts to (B, H, L, S)."""
    if options.softcap is None:
        return nn.functional.scaled_dot_product_attention(
            q_BHLD,
            k_BGSD,
            v_BGSD,
            attn_mask=visible,
            scale=options.scaling,
            enable_gqa=q_BHLD.shape[1] != k_BGSD.shape[1],
        )
    share = q_BHLD.shape[1] // k_BGSD.shape[1]
    k_BHSD, v_BHSD = (x.repeat_interleave(share, dim=1) for x in (k_BGSD, v_BGSD))
    scores = (q_BHLD @ k_BHSD.transpose(-1, -2)) * options.scaling
    scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q_BHLD.dtype)
    return probs @ v_BHSD
