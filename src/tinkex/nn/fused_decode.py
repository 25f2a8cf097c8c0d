"""Fused decode step: one C call runs all layers when every row is a sequence's next token.

Models with standard layers (RMS norm, RoPE attention, SwiGLU MLP) are described to the kernel
once. The fused step is used only if it is bit-identical to running the layers one by one.

Shape letters: M rows, D hidden width, W head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tinkex.nn.cached_attention import CachedAttention, DecodeRows
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.fused_layers import FusedAttention, FusedGatedMLP
from tinkex.nn.kv_cache import KVBlock, KVCacheSpec, KVShape
from tinkex.nn.lm_head import FrozenEmbedding
from tinkex.nn.lora_decode import DecodeLora
from tinkex.nn.lora_linear import MergedLoraLinear
from tinkex.nn.ops import library
from tinkex.nn.ops.attention import MAX_HEAD_DIM
from tinkex.nn.ops.library import LANES, load_kernels
from tinkex.nn.ops.rms_norm import FrozenRMSNorm
from tinkex.nn.ops.rotary import RotaryTable

#: Cache lengths of the sequences that compare the fused step with the layers.
_CHECK_LENGTHS = (0, 2, 5)


class LayerShape(NamedTuple):
    """Sizes of a layer."""

    width: int
    query_heads: int
    kv_heads: int
    head_width: int
    inner: int

    @property
    def is_supported(self) -> bool:
        """Whether the kernel supports these sizes; half heads must be multiples of the lanes."""
        widths = (self.width, self.inner, self.head_width // 2)
        is_even = all(width % LANES == 0 for width in widths) and self.head_width % 2 == 0
        return is_even and self.head_width <= MAX_HEAD_DIM


class _StandardLayer(NamedTuple):
    """A decoder layer that the kernel supports."""

    input_norm: FrozenRMSNorm
    attention: FusedAttention
    post_attention_norm: FrozenRMSNorm
    mlp: FusedGatedMLP

    @property
    def shape(self) -> LayerShape:
        """Sizes of the layer."""
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
        """Linear layers, in the order of the kernel's struct."""
        return (
            self.attention.qkv_proj,
            self.attention.o_proj,
            self.mlp.gate_up_proj,
            self.mlp.down_proj,
        )

    @classmethod
    def from_module(cls, module: nn.Module) -> _StandardLayer | None:
        """Read the parts of a layer; None if it is not a standard layer."""
        names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
        children = dict(module.named_children())
        if set(children) != set(names):
            return None
        layer = cls(*(children[name] for name in names))  # type: ignore[arg-type]
        types = (FrozenRMSNorm, FusedAttention, FrozenRMSNorm, FusedGatedMLP)
        if not all(isinstance(part, type_) for part, type_ in zip(layer, types, strict=True)):
            return None
        is_plain = layer.mlp.is_silu and layer.attention.options.softcap is None
        return (
            layer if is_plain and all(one.frozen.packed_weight for one in layer.linears) else None
        )


class FusedDecoder:
    """The layers of a model in the structs of the kernel."""

    def __init__(
        self,
        layers: Sequence[_StandardLayer],
        embedding: nn.Embedding | FrozenEmbedding,
        final_norm: FrozenRMSNorm,
        rotary: RotaryTable,
    ) -> None:
        kernels = load_kernels()
        assert kernels is not None
        self._decode_step = kernels.decode_step
        self._embedding, self._rotary = embedding, rotary
        self.shape = layers[0].shape
        self.num_layers = len(layers)
        # The structs hold addresses of these.
        self._keepalive = (layers, final_norm)
        self._layer_structs = (library.LayerStruct * len(layers))(*map(_layer_struct, layers))
        self._target_indices = [group.target_index for layer in layers for group in layer.linears]
        self._model_struct = library.ModelStruct(
            *(ctypes.addressof(self._layer_structs), len(layers)),
            _norm_struct(final_norm),
            *self.shape,
        )

    @classmethod
    def from_decoder(
        cls, decoder: nn.Module, layers: Sequence[nn.Module], vocab_size: int
    ) -> FusedDecoder | None:
        """Describe a model's layers; None if the kernel does not support them."""
        parsed = [_StandardLayer.from_module(layer) for layer in layers]
        standard = [layer for layer in parsed if layer is not None]
        parts = (getattr(decoder, name, None) for name in ("embed_tokens", "norm", "rotary_emb"))
        embedding, final_norm, rotary = parts
        if (
            len(standard) < len(parsed)
            or not isinstance(embedding, (nn.Embedding, FrozenEmbedding))
            or not isinstance(final_norm, FrozenRMSNorm)
            or not isinstance(rotary, RotaryTable)
            or embedding.num_embeddings < vocab_size
            or len({layer.shape for layer in standard}) != 1
            or not standard[0].shape.is_supported
        ):
            return None
        return cls(standard, embedding, final_norm, rotary)

    def hidden_states(
        self, tokens_M: Tensor, positions_M: Tensor, context: ForwardContext
    ) -> Tensor | None:
        """Return the last hidden states, (M, D); None if the kernel does not support this pass."""
        attention, lora = context.attention, context.lora
        if not isinstance(attention, CachedAttention) or not isinstance(lora, DecodeLora):
            return None
        segments = [
            segment
            for segment in attention.segments
            if isinstance(segment, DecodeRows) and segment.is_self_contained
        ]
        if len(segments) < len(attention.segments) or torch.is_grad_enabled():
            return None
        pairs = [span.adapter.pairs.struct_pointer(self._target_indices) for span in lora.spans]
        if None in pairs:
            return None
        spans = [
            library.AdapterSpanStruct(span.start, span.stop, pointer)
            for span, pointer in zip(lora.spans, pairs, strict=True)
        ]
        return self._run_step(tokens_M, positions_M, (segments, attention.order), spans)

    def _run_step(
        self,
        tokens_M: Tensor,
        positions_M: Tensor,
        segments_and_order: tuple[Sequence[DecodeRows], Tensor | None],
        spans: Sequence[library.AdapterSpanStruct],
    ) -> Tensor:
        segments, order = segments_and_order
        counts = [segment.num_rows for segment in segments]
        blocks = np.repeat(np.arange(len(segments)), counts)
        slots = np.concatenate([np.arange(count) for count in counts])
        if order is not None:
            blocks, slots = blocks[order.numpy()], slots[order.numpy()]
        cos_MW, sin_MW = self._rotary.signed_cos_sin(positions_M)
        x_MD = self._embedding(tokens_M)
        out_MD = torch.empty_like(x_MD)
        is_done = self._decode_step(
            ctypes.addressof(self._model_struct),
            *((library.AdapterSpanStruct * len(spans))(*spans), len(spans)),
            (library.KVBlockStruct * len(segments))(
                *(library.KVBlockStruct(*segment.addresses) for segment in segments)
            ),
            *(len(slots), x_MD.data_ptr(), blocks.ctypes.data, slots.ctypes.data),
            *(cos_MW.data_ptr(), sin_MW.data_ptr(), out_MD.data_ptr(), torch.get_num_threads()),
        )
        if not is_done:
            raise MemoryError("out of memory for a decode step")
        return out_MD


def matches_reference(
    decoder: FusedDecoder, reference: Callable[[Tensor, Tensor, ForwardContext], Tensor]
) -> bool:
    """Whether the fused step is bit-identical to `reference` in outputs and KV cache."""
    shape = decoder.shape
    layer = KVShape(shape.kv_heads, shape.head_width, shape.head_width)
    spec = KVCacheSpec([layer] * decoder.num_layers, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    blocks = [KVBlock(spec, len(_CHECK_LENGTHS), max(_CHECK_LENGTHS) + 1) for _ in range(2)]
    for one, other in zip(*(block.keys + block.values for block in blocks), strict=True):
        other.copy_(one.normal_(generator=generator))
    lengths = np.array(_CHECK_LENGTHS)
    tokens_M, positions_M = torch.arange(len(lengths)), torch.from_numpy(lengths)
    lora = DecodeLora([])
    contexts = [ForwardContext(lora, CachedAttention([DecodeRows(one, lengths)])) for one in blocks]
    with torch.no_grad():
        fused = decoder.hidden_states(tokens_M, positions_M, contexts[0])
        expected = reference(tokens_M, positions_M, contexts[1])
    caches = zip(*(block.keys + block.values for block in blocks), strict=True)
    return (
        fused is not None
        and torch.equal(fused, expected)
        and all(torch.equal(one, other) for one, other in caches)
    )


def _layer_struct(layer: _StandardLayer) -> library.LayerStruct:
    qk_norm = layer.attention.head_layout.norm
    return library.LayerStruct(
        _norm_struct(layer.input_norm),
        library.NormStruct() if qk_norm is None else _norm_struct(qk_norm),
        _norm_struct(layer.post_attention_norm),
        (library.LinearStruct * library.LINEARS_PER_LAYER)(
            *(_linear_struct(group) for group in layer.linears)
        ),
        *(layer.attention.options.scaling, layer.attention.options.window or 0),
    )


def _norm_struct(norm: FrozenRMSNorm) -> library.NormStruct:
    return library.NormStruct(norm.scale.data_ptr(), norm.eps_sum)


def _linear_struct(group: MergedLoraLinear) -> library.LinearStruct:
    weight, bias_N = group.frozen.packed_weight, group.frozen.bias_N
    assert weight is not None
    return library.LinearStruct(weight.struct, None if bias_N is None else bias_N.data_ptr())
