"""Attention for hosted models: transformers calls it, and the running pass says who sees whom.

Shape letters: T rows, H query heads, G key heads, D head width, B sequences of one
length, L length, S positions seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tinkex.nn.running import Options, current

#: What hosted models name as their attention.
NAME = "tinkex"


def _called(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls: tensors of (1, heads, T, D) in, (1, T, heads, D) out."""
    scaling = options.get("scaling")
    how = Options(
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        options.get("sliding_window"),
        options.get("softcap"),
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    out_THD = current().attention.attend(layer, query[0], key[0], value[0], how)
    return out_THD.unsqueeze(0), None


AttentionInterface.register(NAME, _called)


class _Run(NamedTuple):
    """Sequences of the same length that follow each other."""

    num: int
    length: int


class PackedAttention:
    """Sequences packed end to end; each sees itself alone, and what is before."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._runs = [_Run(len(list(group)), length) for length, group in groupby(lengths)]
        self._sizes = [run.num * run.length for run in self._runs]

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, how: Options
    ) -> Tensor:
        """Attention run by run; a run is one call."""
        if len(self._runs) == 1:
            return _run(self._runs[0], q_HTD, k_GTD, v_GTD, how)
        # Split, not sliced: the way back of a slice is as long as all rows.
        parts = zip(
            self._runs,
            *(torch.split(x_HTD, self._sizes, dim=1) for x_HTD in (q_HTD, k_GTD, v_GTD)),
            strict=True,
        )
        return torch.cat([_run(run, q, k, v, how) for run, q, k, v in parts])


def _run(run: _Run, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, how: Options) -> Tensor:
    q_BHLD, k_BGLD, v_BGLD = (_folded(x_HTD, run) for x_HTD in (q_HTD, k_GTD, v_GTD))
    return causal(q_BHLD, k_BGLD, v_BGLD, how).transpose(1, 2).flatten(0, 1)


def _folded(x_HTD: Tensor, run: _Run) -> Tensor:
    return torch.unflatten(x_HTD, 1, (run.num, run.length)).transpose(0, 1)


def causal(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, how: Options) -> Tensor:
    """Each position sees itself and those before it, as far as the window goes."""
    length = q_BHLD.shape[2]
    is_cut = how.window is not None and length > how.window
    if not is_cut and how.softcap is None:
        return nn.functional.scaled_dot_product_attention(
            q_BHLD,
            k_BGLD,
            v_BGLD,
            is_causal=True,
            scale=how.scaling,
            enable_gqa=q_BHLD.shape[1] != k_BGLD.shape[1],
        )
    at = torch.arange(length, device=q_BHLD.device)
    seen_LL = at[:, None] >= at
    if how.window is not None:
        seen_LL &= at[:, None] - at < how.window
    return masked(q_BHLD, k_BGLD, v_BGLD, seen_LL, how)


def masked(q_BHLD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, seen: Tensor, how: Options) -> Tensor:
    """Attention where `seen` is true; it broadcasts to (B, H, L, S)."""
    if how.softcap is None:
        return nn.functional.scaled_dot_product_attention(
            q_BHLD,
            k_BGSD,
            v_BGSD,
            attn_mask=seen,
            scale=how.scaling,
            enable_gqa=q_BHLD.shape[1] != k_BGSD.shape[1],
        )
    share = q_BHLD.shape[1] // k_BGSD.shape[1]
    k_BHSD, v_BHSD = (x.repeat_interleave(share, dim=1) for x in (k_BGSD, v_BGSD))
    scores = (q_BHLD @ k_BHSD.transpose(-1, -2)) * how.scaling
    scores = torch.tanh(scores / how.softcap) * how.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    chances = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q_BHLD.dtype)
    return chances @ v_BHSD
