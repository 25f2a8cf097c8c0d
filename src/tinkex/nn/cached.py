"""Attention of running samples: new rows see the keys and values kept of earlier ones.

A pass has parts, each with its own rows: blocks of samples that each add one token, and prompts
that add many. Samples of one prompt may share its keys and values; what they see is then computed
in two parts, which are weighed by how much of the total each holds.

Shape letters: M rows of a part, H query heads, G key heads, S query heads per key head, D head
width, N samples, L tokens seen, P tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tinkex.nn.attention import masked
from tinkex.nn.kept import Block, KeyShape, Stored
from tinkex.nn.native.sight import can_see, see
from tinkex.nn.running import Options

Lengths = npt.NDArray[np.int64]

#: Masks have lengths that are multiples of this, so that memory of the same size is used again.
_STRIDE = 32


class Part(Protocol):
    """Some rows of a pass, one after the other."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        ...

    def attend(
        self, layer: int, q_HMD: Tensor, k_GMD: Tensor, v_GMD: Tensor, how: Options
    ) -> Tensor:
        """Keep the new keys and values, and see; returns (M, H, D)."""
        ...


class CachedAttention:
    """The parts of a pass, in the order of their rows.

    The first rows may lie in another order than their parts have them: `order` says which row of
    the parts each of them is.
    """

    def __init__(self, parts: Sequence[Part], order: Tensor | None = None) -> None:
        self.parts = parts
        self.order = order
        self._back = torch.argsort(order) if order is not None else None

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, how: Options
    ) -> Tensor:
        """Attention part by part."""
        if self._back is not None:
            q_HTD, k_GTD, v_GTD = (_ordered(x, self._back) for x in (q_HTD, k_GTD, v_GTD))
        out_THD = self._in_parts(layer, q_HTD, k_GTD, v_GTD, how)
        if self.order is None:
            return out_THD
        return _ordered(out_THD.transpose(0, 1), self.order).transpose(0, 1)

    def _in_parts(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, how: Options
    ) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0].attend(layer, q_HTD, k_GTD, v_GTD, how)
        outs, start = [], 0
        for part in self.parts:
            mine = slice(start, start + part.num_rows)
            outs.append(part.attend(layer, q_HTD[:, mine], k_GTD[:, mine], v_GTD[:, mine], how))
            start = mine.stop
        return torch.cat(outs)


class ShapeProbe:
    """Notes what the layers of a model would have to keep of a token."""

    def __init__(self) -> None:
        self.shapes: dict[int, KeyShape] = {}

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, how: Options
    ) -> Tensor:
        """Each row sees itself alone."""
        self.shapes[layer] = KeyShape(k_GTD.shape[0], k_GTD.shape[-1], v_GTD.shape[-1])
        share = q_HTD.shape[0] // k_GTD.shape[0]
        return v_GTD.repeat_interleave(share, dim=0).transpose(0, 1)


class SampleRows:
    """The samples of a block's first slots: each adds one token and sees all of its own."""

    def __init__(self, block: Block, lengths: Lengths, shared: Stored | None = None) -> None:
        self._block = block
        self._lengths = lengths
        """How many tokens each slot holds before this pass."""
        self._lengths_at = lengths.ctypes.data
        self._shared = shared
        self._is_even = bool((lengths == lengths[0]).all())
        self._top = int(lengths.max()) + 1
        assert self._top <= block.capacity, "a sample has no room for its next token"
        self._places: dict[int, Tensor] = {}
        self._masks: dict[int | None, tuple[slice, Tensor | None]] = {}

    @property
    def num_rows(self) -> int:
        """One per sample."""
        return len(self._lengths)

    @property
    def is_alone(self) -> bool:
        """Whether all that is seen lies in the block."""
        return self._shared is None

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Where keys, values and lengths lie, and how many tokens a slot can hold."""
        keys, values = (int(row.ctypes.data) for row in self._block.addresses)
        return keys, values, self._lengths_at, self._block.capacity

    def attend(
        self, layer: int, q_HND: Tensor, k_GND: Tensor, v_GND: Tensor, how: Options
    ) -> Tensor:
        """All samples at once."""
        num = self.num_rows
        keys, values = self._block.keys[layer], self._block.values[layer]
        if can_see((q_HND, k_GND, v_GND, keys, values), how):
            return self._see(layer, (q_HND, k_GND, v_GND), how)
        place = self._place(k_GND.shape[0], keys.device)
        _put(keys, place, k_GND)
        _put(values, place, v_GND)
        seen, mask = self._seen(how.window, q_HND)
        q_NGSD = q_HND.transpose(0, 1).reshape(num, k_GND.shape[0], -1, q_HND.shape[-1])
        k_NGLD, v_NGLD = keys[:num, :, seen], values[:num, :, seen]
        if self._shared is None:
            out = seen_by(q_NGSD, k_NGLD, v_NGLD, mask, how)
        else:
            out = self._with_shared(layer, q_NGSD, weighed(q_NGSD, k_NGLD, v_NGLD, mask, how), how)
        return out.reshape(num, -1, out.shape[-1])

    def _see(self, layer: int, new: tuple[Tensor, Tensor, Tensor], how: Options) -> Tensor:
        keys, values = self._block.keys[layer], self._block.values[layer]
        out_NHD, total_NH = see(new, keys, values, self._lengths_at, how)
        if self._shared is None:
            return out_NHD
        num, num_keys = self.num_rows, new[1].shape[0]
        shape = num, num_keys, -1
        q_NGSD = new[0].transpose(0, 1).reshape(*shape, new[0].shape[-1])
        own = out_NHD.view(*shape, out_NHD.shape[-1]), total_NH.view(shape)
        return self._with_shared(layer, q_NGSD, own, how).reshape(out_NHD.shape)

    def _with_shared(
        self, layer: int, q_NGSD: Tensor, own: tuple[Tensor, Tensor], how: Options
    ) -> Tensor:
        stored = self._shared
        assert stored is not None
        first = 0 if how.window is None else max(0, stored.num_tokens + self._top - how.window)
        if first >= stored.num_tokens:
            return own[0]
        num, _, share, _ = q_NGSD.shape
        out, total = weighed(
            q_NGSD.transpose(0, 1).flatten(1, 2).unsqueeze(0),
            stored.keys[layer][:, first:].unsqueeze(0),
            stored.values[layer][:, first:].unsqueeze(0),
            None,
            how,
        )
        out_NGSD = out[0].unflatten(1, (num, share)).transpose(0, 1)
        total_NGS = total[0].unflatten(1, (num, share)).transpose(0, 1)
        return joined(own, (out_NGSD, total_NGS))

    def _place(self, num_heads: int, device: torch.device) -> Tensor:
        """Where each sample's next key lies among all rows of a block, head by head."""
        place = self._places.get(num_heads)
        if place is None:
            slots = np.arange(self.num_rows)[:, None] * num_heads + np.arange(num_heads)
            rows = slots * self._block.capacity + self._lengths[:, None]
            place = self._places[num_heads] = torch.from_numpy(rows.ravel()).to(device)
        return place

    def _seen(self, window: int | None, like: Tensor) -> tuple[slice, Tensor | None]:
        """Which tokens of the slots are looked at, and what is added to their scores."""
        found = self._masks.get(window)
        if found is None:
            found = self._masks[window] = self._new_mask(window, like)
        return found

    def _new_mask(self, window: int | None, like: Tensor) -> tuple[slice, Tensor | None]:
        first = 0 if window is None else max(0, int(self._lengths.min()) + 1 - window)
        if self._is_even:
            return slice(first, self._top), None
        last = min(self._block.capacity, -(-self._top // _STRIDE) * _STRIDE)
        at = np.arange(first, last)
        ends = self._lengths[:, None] + 1
        is_hidden = at >= ends
        if window is not None:
            is_hidden |= at < ends - window
        hidden = torch.from_numpy(is_hidden).to(like.device)
        mask = torch.zeros(is_hidden.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(hidden, float("-inf"))
        return slice(first, last), mask[:, None, None]


class PromptRows:
    """Tokens of one prompt that follow those which are filled in already."""

    def __init__(self, stored: Stored, start: int, stop: int) -> None:
        self._stored = stored
        self._start, self._stop = start, stop

    @property
    def num_rows(self) -> int:
        """One per token."""
        return self._stop - self._start

    def attend(
        self, layer: int, q_HMD: Tensor, k_GMD: Tensor, v_GMD: Tensor, how: Options
    ) -> Tensor:
        """Each token sees itself and those before it."""
        start, stop = self._start, self._stop
        keys, values = self._stored.keys[layer], self._stored.values[layer]
        keys[:, start:stop] = k_GMD
        values[:, start:stop] = v_GMD
        q, k, v = (x.unsqueeze(0) for x in (q_HMD, keys[:, :stop], values[:, :stop]))
        is_cut = how.window is not None and stop > how.window
        if is_cut or how.softcap is not None:
            out = masked(q, k, v, _before(start, stop, how.window, q.device), how)
        elif start == 0:
            out = _causal(q, k, v, how)[0]
        else:
            new = _causal(q, k[:, :, start:], v[:, :, start:], how)
            out = joined(new, weighed(q, k[:, :, :start], v[:, :, :start], None, how))
        return out[0].transpose(0, 1)


def seen_by(
    q_NGSD: Tensor, k_NGLD: Tensor, v_NGLD: Tensor, mask: Tensor | None, how: Options
) -> Tensor:
    """What queries see of keys and values."""
    if how.softcap is not None:
        return weighed(q_NGSD, k_NGLD, v_NGLD, mask, how)[0]
    return nn.functional.scaled_dot_product_attention(
        q_NGSD, k_NGLD, v_NGLD, attn_mask=mask, scale=how.scaling
    )


def weighed(
    q_NHSD: Tensor, k_NGLD: Tensor, v_NGLD: Tensor, mask: Tensor | None, how: Options
) -> tuple[Tensor, Tensor]:
    """What queries see, and the logarithm of the total weight of it."""
    is_fused = (
        how.softcap is None and q_NHSD.device.type == "cpu" and q_NHSD.shape[-1] == v_NGLD.shape[-1]
    )
    if is_fused:
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_NHSD, k_NGLD, v_NGLD, 0.0, False, attn_mask=mask, scale=how.scaling
        )
        return out, total
    k, v = _repeated(q_NHSD, k_NGLD, v_NGLD)
    scores = (q_NHSD @ k.transpose(-1, -2)).float() * how.scaling
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is not None:
        scores = scores + mask
    total = scores.logsumexp(-1)
    return (scores - total.unsqueeze(-1)).exp().to(v.dtype) @ v, total


def joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """What is seen of two parts together."""
    share = torch.sigmoid(other[1] - one[1]).unsqueeze(-1)
    return torch.lerp(one[0], other[0], share.to(one[0].dtype))


def _causal(q: Tensor, k: Tensor, v: Tensor, how: Options) -> tuple[Tensor, Tensor]:
    """Rows see themselves and those before; one row for each key."""
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, True, scale=how.scaling
        )
        return out, total
    seen = _before(0, q.shape[2], None, q.device)
    mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
    return weighed(q, k, v, mask.masked_fill_(~seen, float("-inf")), how)


def _before(start: int, stop: int, window: int | None, device: torch.device) -> Tensor:
    """Whether each of the rows sees each position up to the last."""
    row = torch.arange(start, stop, device=device)[:, None]
    at = torch.arange(stop, device=device)
    seen = at <= row
    return seen if window is None else seen & (row - at < window)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    share = q.shape[1] // k.shape[1]
    if share == 1:
        return k, v
    return k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)


def _ordered(x_HTD: Tensor, order: Tensor) -> Tensor:
    """The first rows in another order."""
    x_THD = x_HTD.transpose(0, 1)
    first = x_THD[order]
    num = len(order)
    whole = first if num == len(x_THD) else torch.cat([first, x_THD[num:]])
    return whole.transpose(0, 1)


def _put(kept: Tensor, place: Tensor, new_GND: Tensor) -> None:
    width = new_GND.shape[-1]
    kept.view(-1, width).index_copy_(0, place, new_GND.transpose(0, 1).reshape(-1, width))
