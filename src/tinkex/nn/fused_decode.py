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

from tinkex.nn.cached_attention import CachedAttention, DecodeRows
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.fused_layers import FusedAttention, FusedGatedMLP
from tinkex.nn.kv_cache import KVBlock, KVCacheSpec, KVShape
from tinkex.nn.lora_decode import DecodeLora
from tinkex.nn.lora_linear import MergedLoraLinear
from tinkex.nn.ops import library
from tinkex.nn.ops.decode_attention import MAX_HEAD_DIM
from tinkex.nn.ops.library import LANES, load_kernels
from tinkex.nn.ops.rms_norm import FrozenRMSNorm
from tinkex.nn.ops.rotary import RotaryTable

#: How many tokens the samples hold with which a model is tried.
_CHECK_LENGTHS = (0, 2, 5)


class LayerShape(NamedTuple):
    """The sizes of a layer."""

    width: int
    query_heads: int
    key_heads: int
    head_width: int
    inner: int

    @property
    def is_supported(self) -> bool:
        """Whether the kernel takes such layers: so many numbers at a time, halves of heads too."""
        widths = (self.width, self.inner, self.head_width // 2)
        is_even = all(width % LANES == 0 for width in widths) and self.head_width % 2 == 0
        return is_even and self.head_width <= MAX_HEAD_DIM


class _StandardLayer(NamedTuple):
    """A layer of the usual kind."""

    input_norm: FrozenRMSNorm
    attention: FusedAttention
    post_attention_norm: FrozenRMSNorm
    mlp: FusedGatedMLP

    @property
    def shape(self) -> LayerShape:
        """Its sizes."""
        heads, inner = self.attention.head_layout, self.mlp.down_proj.in_features
        width = self.attention.head_dim
        return LayerShape(
            self.mlp.gate_up_proj.in_features,
            heads.num_query_heads,
            heads.num_kv_heads,
            width,
            inner,
        )

    @property
    def linears(self) -> tuple[MergedLoraLinear, ...]:
        """Its linear maps, in the order in which the kernel wants them."""
        return (
            self.attention.qkv_proj,
            self.attention.o_proj,
            self.mlp.gate_up_proj,
            self.mlp.down_proj,
        )

    @classmethod
    def from_module(cls, module: nn.Module) -> _StandardLayer | None:
        """Read a layer; None if it is something else."""
        names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
        found = dict(module.named_children())
        if set(found) != set(names):
            return None
        layer = cls(*(found[name] for name in names))  # type: ignore[arg-type]
        kinds = (FrozenRMSNorm, FusedAttention, FrozenRMSNorm, FusedGatedMLP)
        if not all(isinstance(one, kind) for one, kind in zip(layer, kinds, strict=True)):
            return None
        is_plain = layer.mlp.is_silu and layer.attention.options.softcap is None
        return (
            layer if is_plain and all(one.frozen.packed_weight for one in layer.linears) else None
        )


class FusedDecoder:
    """The layers of a model, as the kernel reads them."""

    def __init__(
        self,
        layers: Sequence[_StandardLayer],
        embedding: Tensor,
        final_norm: FrozenRMSNorm,
        rotary: RotaryTable,
    ) -> None:
        found = load_kernels()
        assert found is not None
        self._decode_step, self._rotary = found.decode_step, rotary
        self.shape = layers[0].shape
        self.num_layers = len(layers)
        # Everything whose address the kernel has must stay.
        self._keepalive = (layers, embedding, final_norm)
        self._layer_structs = (library.LayerStruct * len(layers))(*map(_layer_struct, layers))
        self._target_indices = [group.target_index for layer in layers for group in layer.linears]
        self._model_struct = library.ModelStruct(
            *(embedding.data_ptr(), ctypes.addressof(self._layer_structs), len(layers)),
            _norm_struct(final_norm),
            *self.shape,
        )

    @classmethod
    def from_decoder(
        cls, decoder: Any, layers: Sequence[nn.Module], vocab_size: int
    ) -> FusedDecoder | None:
        """Describe a model's layers; None if they are not of the usual kind."""
        read = [_StandardLayer.from_module(layer) for layer in layers]
        usual = [layer for layer in read if layer is not None]
        parts = (getattr(decoder, name, None) for name in ("embed_tokens", "norm", "rotary_emb"))
        embedding, last, angles = parts
        if (
            len(usual) < len(read)
            or not isinstance(embedding, nn.Embedding)
            or not isinstance(last, FrozenRMSNorm)
            or not isinstance(angles, RotaryTable)
            or embedding.num_embeddings < vocab_size
            or len({layer.shape for layer in usual}) != 1
            or not usual[0].shape.is_supported
        ):
            return None
        return cls(usual, embedding.weight.detach(), last, angles)

    def hidden_states(
        self, tokens_M: Tensor, positions_M: Tensor, context: ForwardContext
    ) -> Tensor | None:
        """The last hidden states, (M, D); None if this pass needs more than the kernel can do."""
        attention, rows = context.attention, context.lora
        if not isinstance(attention, CachedAttention) or not isinstance(rows, DecodeLora):
            return None
        parts = [
            part
            for part in attention.segments
            if isinstance(part, DecodeRows) and part.is_self_contained
        ]
        if len(parts) < len(attention.segments) or torch.is_grad_enabled():
            return None
        pairs = [one.adapter.pairs.struct_pointer(self._target_indices) for one in rows.spans]
        if None in pairs:
            return None
        stretches = [
            library.AdapterSpanStruct(one.start, one.stop, at)
            for one, at in zip(rows.spans, pairs, strict=True)
        ]
        return self._run_step(tokens_M, positions_M, (parts, attention.order), stretches)

    def _run_step(
        self,
        tokens_M: Tensor,
        positions_M: Tensor,
        segments_and_order: tuple[Sequence[DecodeRows], Tensor | None],
        spans: Sequence[library.AdapterSpanStruct],
    ) -> Tensor:
        parts, order = segments_and_order
        numbers = [part.num_rows for part in parts]
        blocks = np.repeat(np.arange(len(parts)), numbers)
        slots = np.concatenate([np.arange(number) for number in numbers])
        if order is not None:
            blocks, slots = blocks[order.numpy()], slots[order.numpy()]
        cos_MW, sin_MW = self._rotary.signed_cos_sin(positions_M)
        out_MD = cos_MW.new_empty(len(slots), self.shape.width)
        is_done = self._decode_step(
            ctypes.addressof(self._model_struct),
            *((library.AdapterSpanStruct * len(spans))(*spans), len(spans)),
            (library.KVBlockStruct * len(parts))(
                *(library.KVBlockStruct(*part.addresses) for part in parts)
            ),
            *(len(slots), tokens_M.data_ptr(), blocks.ctypes.data, slots.ctypes.data),
            *(cos_MW.data_ptr(), sin_MW.data_ptr(), out_MD.data_ptr(), torch.get_num_threads()),
        )
        if not is_done:
            raise MemoryError("no memory for a step of samples")
        return out_MD


def matches_reference(
    decoder: FusedDecoder, reference: Callable[[Tensor, Tensor, ForwardContext], Tensor]
) -> bool:
    """Whether a step says to the bit what `run` says, layer by layer, and keeps the same."""
    shape = decoder.shape
    layer = KVShape(shape.key_heads, shape.head_width, shape.head_width)
    kind = KVCacheSpec([layer] * decoder.num_layers, torch.float32, torch.device("cpu"))
    dice = torch.Generator().manual_seed(0)
    blocks = [KVBlock(kind, len(_CHECK_LENGTHS), max(_CHECK_LENGTHS) + 1) for _ in range(2)]
    for one, other in zip(*(block.keys + block.values for block in blocks), strict=True):
        other.copy_(one.normal_(generator=dice))
    lengths = np.array(_CHECK_LENGTHS)
    tokens_M, positions_M = torch.arange(len(lengths)), torch.from_numpy(lengths)
    rows = DecodeLora([])
    passes = [ForwardContext(rows, CachedAttention([DecodeRows(one, lengths)])) for one in blocks]
    with torch.no_grad():
        mine = decoder.hidden_states(tokens_M, positions_M, passes[0])
        theirs = reference(tokens_M, positions_M, passes[1])
    kept = zip(*(block.keys + block.values for block in blocks), strict=True)
    return (
        mine is not None
        and torch.equal(mine, theirs)
        and all(torch.equal(one, other) for one, other in kept)
    )


def _layer_struct(layer: _StandardLayer) -> library.LayerStruct:
    heads = layer.attention.head_layout.norm
    return library.LayerStruct(
        *(
            _norm_struct(layer.input_norm),
            library.NormStruct() if heads is None else _norm_struct(heads),
        ),
        _norm_struct(layer.post_attention_norm),
        (library.LinearStruct * library.LINEARS_PER_LAYER)(
            *(_linear_struct(group) for group in layer.linears)
        ),
        *(layer.attention.options.scaling, layer.attention.options.window or 0),
    )


def _norm_struct(norm: FrozenRMSNorm) -> library.NormStruct:
    return library.NormStruct(norm.scale.data_ptr(), norm.eps_sum)


def _linear_struct(group: MergedLoraLinear) -> library.LinearStruct:
    panels, bias_N = group.frozen.packed_weight, group.frozen.bias_N
    assert panels is not None
    return library.LinearStruct(
        *(panels.address, None if bias_N is None else bias_N.data_ptr()),
        *(panels.num_inputs, panels.num_outputs),
    )
