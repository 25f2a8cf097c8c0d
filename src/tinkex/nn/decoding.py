"""All layers at once, for passes in which every row is the next token of a sample.

A model whose layers are of the usual kind is described to our kernels once; a step is then one
call, where each layer would take a dozen. It is used only if it was seen to say the same.

Shape letters: M rows, D hidden width, W head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tinkex.nn.angles import AngleTable
from tinkex.nn.attending import Attending
from tinkex.nn.cached import CachedAttention, SampleRows
from tinkex.nn.gated import GatedMlp
from tinkex.nn.kept import Block, KeyShape, Kind
from tinkex.nn.linear import LinearGroup
from tinkex.nn.native import steps
from tinkex.nn.native.library import LANES, library
from tinkex.nn.native.sight import MAX_WIDTH
from tinkex.nn.norms import RmsNorm
from tinkex.nn.running import Pass
from tinkex.nn.sampled import SampledRows

#: How many tokens the samples hold with which a model is tried.
_TRIAL_LENGTHS = (0, 2, 5)


class Shape(NamedTuple):
    """The sizes of a layer."""

    width: int
    query_heads: int
    key_heads: int
    head_width: int
    inner: int

    @property
    def is_suited(self) -> bool:
        """Whether the kernel takes such layers: so many numbers at a time, halves of heads too."""
        widths = (self.width, self.inner, self.head_width // 2)
        is_even = all(width % LANES == 0 for width in widths) and self.head_width % 2 == 0
        return is_even and self.head_width <= MAX_WIDTH


class _Layer(NamedTuple):
    """A layer of the usual kind."""

    before: RmsNorm
    attention: Attending
    between: RmsNorm
    mlp: GatedMlp

    @property
    def shape(self) -> Shape:
        """Its sizes."""
        heads, inner = self.attention.heads, self.mlp.out.in_features
        width = self.attention.width
        return Shape(self.mlp.into.in_features, heads.num_queries, heads.num_keys, width, inner)

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        """Its linear maps, in the order in which the kernel wants them."""
        return self.attention.into, self.attention.out, self.mlp.into, self.mlp.out

    @classmethod
    def of(cls, module: nn.Module) -> _Layer | None:
        """Read a layer; None if it is something else."""
        names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
        found = dict(module.named_children())
        if set(found) != set(names):
            return None
        layer = cls(*(found[name] for name in names))  # type: ignore[arg-type]
        kinds = (RmsNorm, Attending, RmsNorm, GatedMlp)
        if not all(isinstance(one, kind) for one, kind in zip(layer, kinds, strict=True)):
            return None
        is_plain = layer.mlp.is_silu and layer.attention.how.softcap is None
        return layer if is_plain and all(one.frozen.panels for one in layer.groups) else None


class Decoding:
    """The layers of a model, as the kernel reads them."""

    def __init__(
        self, layers: Sequence[_Layer], embedding: Tensor, last: RmsNorm, angles: AngleTable
    ) -> None:
        found = library()
        assert found is not None
        self._run, self._angles = found.run_step, angles
        self.shape = layers[0].shape
        self.num_layers = len(layers)
        # Everything whose address the kernel has must stay.
        self._kept = (layers, embedding, last)
        self._layers = (steps.Layer * len(layers))(*map(_described, layers))
        self._sites = [group.site for layer in layers for group in layer.groups]
        self._model = steps.Model(
            *(embedding.data_ptr(), ctypes.addressof(self._layers), len(layers)),
            _norm(last),
            *self.shape,
        )

    @classmethod
    def of(cls, decoder: Any, layers: Sequence[nn.Module], vocab_size: int) -> Decoding | None:
        """Describe a model's layers; None if they are not of the usual kind."""
        read = [_Layer.of(layer) for layer in layers]
        usual = [layer for layer in read if layer is not None]
        parts = (getattr(decoder, name, None) for name in ("embed_tokens", "norm", "rotary_emb"))
        embedding, last, angles = parts
        if (
            len(usual) < len(read)
            or not isinstance(embedding, nn.Embedding)
            or not isinstance(last, RmsNorm)
            or not isinstance(angles, AngleTable)
            or embedding.num_embeddings < vocab_size
            or len({layer.shape for layer in usual}) != 1
            or not usual[0].shape.is_suited
        ):
            return None
        return cls(usual, embedding.weight.detach(), last, angles)

    def hidden(self, tokens_M: Tensor, positions_M: Tensor, this: Pass) -> Tensor | None:
        """The last hidden states, (M, D); None if this pass needs more than the kernel can do."""
        attention, rows = this.attention, this.rows
        if not isinstance(attention, CachedAttention) or not isinstance(rows, SampledRows):
            return None
        parts = [part for part in attention.parts if isinstance(part, SampleRows) and part.is_alone]
        if len(parts) < len(attention.parts) or torch.is_grad_enabled():
            return None
        pairs = [one.adapter.pairs.described(self._sites) for one in rows.stretches]
        if None in pairs:
            return None
        stretches = [
            steps.Stretch(one.start, one.stop, at)
            for one, at in zip(rows.stretches, pairs, strict=True)
        ]
        return self._step(tokens_M, positions_M, (parts, attention.order), stretches)

    def _step(
        self,
        tokens_M: Tensor,
        positions_M: Tensor,
        seen: tuple[Sequence[SampleRows], Tensor | None],
        stretches: Sequence[steps.Stretch],
    ) -> Tensor:
        parts, order = seen
        numbers = [part.num_rows for part in parts]
        blocks = np.repeat(np.arange(len(parts)), numbers)
        slots = np.concatenate([np.arange(number) for number in numbers])
        if order is not None:
            blocks, slots = blocks[order.numpy()], slots[order.numpy()]
        cos_MW, sin_MW = self._angles.signed(positions_M)
        out_MD = cos_MW.new_empty(len(slots), self.shape.width)
        is_done = self._run(
            ctypes.addressof(self._model),
            *((steps.Stretch * len(stretches))(*stretches), len(stretches)),
            (steps.Block * len(parts))(*(steps.Block(*part.addresses) for part in parts)),
            *(len(slots), tokens_M.data_ptr(), blocks.ctypes.data, slots.ctypes.data),
            *(cos_MW.data_ptr(), sin_MW.data_ptr(), out_MD.data_ptr(), torch.get_num_threads()),
        )
        if not is_done:
            raise MemoryError("no memory for a step of samples")
        return out_MD


def proven(found: Decoding, run: Callable[[Tensor, Tensor, Pass], Tensor]) -> bool:
    """Whether a step says to the bit what `run` says, layer by layer, and keeps the same."""
    shape = found.shape
    layer = KeyShape(shape.key_heads, shape.head_width, shape.head_width)
    kind = Kind([layer] * found.num_layers, torch.float32, torch.device("cpu"))
    dice = torch.Generator().manual_seed(0)
    blocks = [Block(kind, len(_TRIAL_LENGTHS), max(_TRIAL_LENGTHS) + 1) for _ in range(2)]
    for one, other in zip(*(block.keys + block.values for block in blocks), strict=True):
        other.copy_(one.normal_(generator=dice))
    lengths = np.array(_TRIAL_LENGTHS)
    tokens_M, positions_M = torch.arange(len(lengths)), torch.from_numpy(lengths)
    rows = SampledRows([])
    passes = [Pass(rows, CachedAttention([SampleRows(one, lengths)])) for one in blocks]
    with torch.no_grad():
        mine = found.hidden(tokens_M, positions_M, passes[0])
        theirs = run(tokens_M, positions_M, passes[1])
    kept = zip(*(block.keys + block.values for block in blocks), strict=True)
    return (
        mine is not None
        and torch.equal(mine, theirs)
        and all(torch.equal(one, other) for one, other in kept)
    )


def _described(layer: _Layer) -> steps.Layer:
    heads = layer.attention.heads.norm
    return steps.Layer(
        *(_norm(layer.before), steps.Norm() if heads is None else _norm(heads)),
        _norm(layer.between),
        (steps.Map * steps.MAPS)(*(_map(group) for group in layer.groups)),
        *(layer.attention.how.scaling, layer.attention.how.window or 0),
    )


def _norm(norm: RmsNorm) -> steps.Norm:
    return steps.Norm(norm.scale.data_ptr(), norm.floor)


def _map(group: LinearGroup) -> steps.Map:
    panels, bias_N = group.frozen.panels, group.frozen.bias_N
    assert panels is not None
    return steps.Map(
        *(panels.address, None if bias_N is None else bias_N.data_ptr()),
        *(panels.num_inputs, panels.num_outputs),
    )
