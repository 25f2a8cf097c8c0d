"""Attention with a KV cache: decode steps of running sequences and prefill of prompts.

A pass has segments: KV blocks whose sequences each add one token, and prompts that add many.
Sequences with the same prompt may share its keys and values; attention to the prompt and to the
sequence's own tokens is then computed separately and merged by log-sum-exp.

Shape letters: T rows of a pass, M rows of a segment, H query heads, G key heads, S query heads per
key head, D head width, N sequences, L visible tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tinkex.nn.forward_context import AttentionOptions
from tinkex.nn.kv_cache import KVBlock, KVShape, PromptKV
from tinkex.nn.ops.attention import can_use_decode_kernel, decode_attention
from tinkex.nn.packed_attention import masked_attention

Lengths = npt.NDArray[np.int64]

#: Mask lengths are rounded up to multiples of this, so that allocations can be reused.
_MASK_ALIGNMENT = 32


class AttentionSegment(Protocol):
    """Consecutive rows of a pass with a common cache."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        ...

    def attend(
        self, layer: int, q_HMD: Tensor, k_GMD: Tensor, v_GMD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Append the new keys and values to the cache and attend; returns (M, H, D)."""
        ...


class CachedAttention:
    """Attention backend that runs the segments of a pass.

    `order` maps the first rows of the pass to rows of the segments, if their order differs.
    """

    def __init__(self, segments: Sequence[AttentionSegment], order: Tensor | None = None) -> None:
        self.segments = segments
        self.order = order
        self._inverse_order = torch.argsort(order) if order is not None else None

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend segment by segment."""
        if self._inverse_order is not None:
            q_HTD, k_GTD, v_GTD = (
                _reorder_rows(x, self._inverse_order) for x in (q_HTD, k_GTD, v_GTD)
            )
        out_THD = self._attend_segments(layer, q_HTD, k_GTD, v_GTD, options)
        if self.order is None:
            return out_THD
        return _reorder_rows(out_THD.transpose(0, 1), self.order).transpose(0, 1)

    def _attend_segments(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        if len(self.segments) == 1:
            return self.segments[0].attend(layer, q_HTD, k_GTD, v_GTD, options)
        outs, start = [], 0
        for segment in self.segments:
            rows = slice(start, start + segment.num_rows)
            q, k, v = q_HTD[:, rows], k_GTD[:, rows], v_GTD[:, rows]
            outs.append(segment.attend(layer, q, k, v, options))
            start = rows.stop
        return torch.cat(outs)


class KVShapeProbe:
    """Attention backend that records the KV shape of each layer."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Record the shapes; each row attends only to itself."""
        self.shapes[layer] = KVShape(k_GTD.shape[0], k_GTD.shape[-1], v_GTD.shape[-1])
        share = q_HTD.shape[0] // k_GTD.shape[0]
        return v_GTD.repeat_interleave(share, dim=0).transpose(0, 1)


class DecodeRows:
    """A decode step: the sequences in a block's first slots each add one token."""

    def __init__(
        self, block: KVBlock, lengths: Lengths, shared_prompt: PromptKV | None = None
    ) -> None:
        self._block = block
        self._lengths = lengths
        """Number of tokens in each slot before this pass."""
        self._lengths_pointer = lengths.ctypes.data
        self._shared_prompt = shared_prompt
        self._has_equal_lengths = bool((lengths == lengths[0]).all())
        self._max_length = int(lengths.max()) + 1
        assert self._max_length <= block.capacity, "a slot is full"
        self._write_positions: dict[int, Tensor] = {}
        self._masks: dict[int | None, tuple[slice, Tensor | None]] = {}

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return len(self._lengths)

    @property
    def is_self_contained(self) -> bool:
        """Whether the block holds all visible tokens, without a shared prompt."""
        return self._shared_prompt is None

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Addresses of keys, values and lengths, and the capacity of a slot."""
        keys, values = (int(row.ctypes.data) for row in self._block.addresses)
        return keys, values, self._lengths_pointer, self._block.capacity

    def attend(
        self, layer: int, q_HND: Tensor, k_GND: Tensor, v_GND: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend for all sequences at once, with the C kernel where it applies."""
        num = self.num_rows
        keys, values = self._block.keys[layer], self._block.values[layer]
        if can_use_decode_kernel((q_HND, k_GND, v_GND, keys, values), options):
            return self._attend_with_kernel(layer, (q_HND, k_GND, v_GND), options)
        positions = self._write_position(k_GND.shape[0], keys.device)
        _write_kv(keys, positions, k_GND)
        _write_kv(values, positions, v_GND)
        visible, mask = self._visible_range(options.window, q_HND)
        q_NGSD = q_HND.transpose(0, 1).reshape(num, k_GND.shape[0], -1, q_HND.shape[-1])
        k_NGLD, v_NGLD = keys[:num, :, visible], values[:num, :, visible]
        if self._shared_prompt is None:
            out = attend_cached(q_NGSD, k_NGLD, v_NGLD, mask, options)
        else:
            out = self._merge_shared_prompt(
                layer, q_NGSD, attend_with_lse(q_NGSD, k_NGLD, v_NGLD, mask, options), options
            )
        return out.reshape(num, -1, out.shape[-1])

    def _attend_with_kernel(
        self, layer: int, new_qkv: tuple[Tensor, Tensor, Tensor], options: AttentionOptions
    ) -> Tensor:
        keys, values = self._block.keys[layer], self._block.values[layer]
        out_NHD, lse_NH = decode_attention(new_qkv, keys, values, self._lengths_pointer, options)
        if self._shared_prompt is None:
            return out_NHD
        num, num_keys = self.num_rows, new_qkv[1].shape[0]
        shape = num, num_keys, -1
        q_NGSD = new_qkv[0].transpose(0, 1).reshape(*shape, new_qkv[0].shape[-1])
        own = out_NHD.view(*shape, out_NHD.shape[-1]), lse_NH.view(shape)
        return self._merge_shared_prompt(layer, q_NGSD, own, options).reshape(out_NHD.shape)

    def _merge_shared_prompt(
        self,
        layer: int,
        q_NGSD: Tensor,
        own_state: tuple[Tensor, Tensor],
        options: AttentionOptions,
    ) -> Tensor:
        prompt = self._shared_prompt
        assert prompt is not None
        first = (
            0
            if options.window is None
            else max(0, prompt.num_tokens + self._max_length - options.window)
        )
        if first >= prompt.num_tokens:
            return own_state[0]
        num, _, share, _ = q_NGSD.shape
        out, lse = attend_with_lse(
            q_NGSD.transpose(0, 1).flatten(1, 2).unsqueeze(0),
            prompt.keys[layer][:, first:].unsqueeze(0),
            prompt.values[layer][:, first:].unsqueeze(0),
            None,
            options,
        )
        out_NGSD = out[0].unflatten(1, (num, share)).transpose(0, 1)
        lse_NGS = lse[0].unflatten(1, (num, share)).transpose(0, 1)
        return merge_attention_states(own_state, (out_NGSD, lse_NGS))

    def _write_position(self, num_heads: int, device: torch.device) -> Tensor:
        """Index of each sequence's next token in the flattened block, head by head."""
        positions = self._write_positions.get(num_heads)
        if positions is None:
            slots = np.arange(self.num_rows)[:, None] * num_heads + np.arange(num_heads)
            rows = slots * self._block.capacity + self._lengths[:, None]
            positions = torch.from_numpy(rows.ravel()).to(device)
            self._write_positions[num_heads] = positions
        return positions

    def _visible_range(self, window: int | None, like: Tensor) -> tuple[slice, Tensor | None]:
        """Visible slice of the slots, and the mask that is added to scores, if any."""
        if window not in self._masks:
            self._masks[window] = self._build_mask(window, like)
        return self._masks[window]

    def _build_mask(self, window: int | None, like: Tensor) -> tuple[slice, Tensor | None]:
        first = 0 if window is None else max(0, int(self._lengths.min()) + 1 - window)
        if self._has_equal_lengths:
            return slice(first, self._max_length), None
        last = min(self._block.capacity, -(-self._max_length // _MASK_ALIGNMENT) * _MASK_ALIGNMENT)
        position = np.arange(first, last)
        ends = self._lengths[:, None] + 1
        is_hidden = position >= ends
        if window is not None:
            is_hidden |= position < ends - window
        hidden = torch.from_numpy(is_hidden).to(like.device)
        mask = torch.zeros(is_hidden.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(hidden, float("-inf"))
        return slice(first, last), mask[:, None, None]


class PrefillRows:
    """Prefill: tokens of one prompt from `start` up to `stop`; earlier ones are cached."""

    def __init__(self, prompt: PromptKV, start: int, stop: int) -> None:
        self._prompt = prompt
        self._start, self._stop = start, stop

    @property
    def num_rows(self) -> int:
        """Number of tokens."""
        return self._stop - self._start

    def attend(
        self, layer: int, q_HMD: Tensor, k_GMD: Tensor, v_GMD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Causal attention to the prompt so far."""
        start, stop = self._start, self._stop
        keys, values = self._prompt.keys[layer], self._prompt.values[layer]
        keys[:, start:stop] = k_GMD
        values[:, start:stop] = v_GMD
        q, k, v = (x.unsqueeze(0) for x in (q_HMD, keys[:, :stop], values[:, :stop]))
        is_windowed = options.window is not None and stop > options.window
        if is_windowed or options.softcap is not None:
            out = masked_attention(
                q, k, v, _causal_mask(start, stop, options.window, q.device), options
            )
        elif start == 0:
            out = _causal_with_lse(q, k, v, options)[0]
        else:
            new = _causal_with_lse(q, k[:, :, start:], v[:, :, start:], options)
            out = merge_attention_states(
                new, attend_with_lse(q, k[:, :, :start], v[:, :, :start], None, options)
            )
        return out[0].transpose(0, 1)


def attend_cached(
    q_NGSD: Tensor, k_NGLD: Tensor, v_NGLD: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Attention of queries to keys and values."""
    if options.softcap is not None:
        return attend_with_lse(q_NGSD, k_NGLD, v_NGLD, mask, options)[0]
    return nn.functional.scaled_dot_product_attention(
        q_NGSD, k_NGLD, v_NGLD, attn_mask=mask, scale=options.scaling
    )


def attend_with_lse(
    q_NHSD: Tensor, k_NGLD: Tensor, v_NGLD: Tensor, mask: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores."""
    is_fused = (
        options.softcap is None
        and q_NHSD.device.type == "cpu"
        and q_NHSD.shape[-1] == v_NGLD.shape[-1]
    )
    if is_fused:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_NHSD, k_NGLD, v_NGLD, 0.0, False, attn_mask=mask, scale=options.scaling
        )
        return out, lse
    k, v = _repeat_kv(q_NHSD, k_NGLD, v_NGLD)
    scores = (q_NHSD @ k.transpose(-1, -2)).float() * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v, lse


def merge_attention_states(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Merge attention to two sets of tokens, given outputs and log-sum-exps."""
    weight = torch.sigmoid(other[1] - one[1]).unsqueeze(-1)
    return torch.lerp(one[0], other[0], weight.to(one[0].dtype))


def _causal_with_lse(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Causal attention with one row per key, and its log-sum-exp."""
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, True, scale=options.scaling
        )
        return out, lse
    visible = _causal_mask(0, q.shape[2], None, q.device)
    mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
    return attend_with_lse(q, k, v, mask.masked_fill_(~visible, float("-inf")), options)


def _causal_mask(start: int, stop: int, window: int | None, device: torch.device) -> Tensor:
    """Whether rows `start` to `stop` may attend to each position before `stop`."""
    row = torch.arange(start, stop, device=device)[:, None]
    position = torch.arange(stop, device=device)
    visible = position <= row
    return visible if window is None else visible & (row - position < window)


def _repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    share = q.shape[1] // k.shape[1]
    if share == 1:
        return k, v
    return k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)


def _reorder_rows(x_HTD: Tensor, order: Tensor) -> Tensor:
    """Reorder the first rows."""
    x_THD = x_HTD.transpose(0, 1)
    first = x_THD[order]
    num = len(order)
    reordered = first if num == len(x_THD) else torch.cat([first, x_THD[num:]])
    return reordered.transpose(0, 1)


def _write_kv(cache: Tensor, positions: Tensor, new_GND: Tensor) -> None:
    width = new_GND.shape[-1]
    cache.view(-1, width).index_copy_(0, positions, new_GND.transpose(0, 1).reshape(-1, width))
