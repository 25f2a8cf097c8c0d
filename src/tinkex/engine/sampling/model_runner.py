"""Runs forward passes over the next token of all sequences and over chunks of prompts.

Shape letters: T token positions, M positions that need logits, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.sampling.kv_manager import SlotGroup
from tinkex.engine.sampling.request_state import PrefillProgress, SamplerAdapter, SequenceState
from tinkex.nn.cached_attention import (
    AttentionSegment,
    CachedAttention,
    DecodeRows,
    KVShapeProbe,
    PrefillRows,
)
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.kv_cache import KVCacheSpec
from tinkex.nn.lora_decode import AdapterSpan, DecodeLora

if TYPE_CHECKING:
    from tinkex.nn.hosted_model import HostedModel

Numbers = npt.NDArray[np.int64]


class PrefillChunk(NamedTuple):
    """The next tokens of a prompt."""

    prefill: PrefillProgress
    num_tokens: int


class DecodeBatch:
    """The sequences of a decode step, grouped by adapter."""

    def __init__(self, slot_groups: Sequence[SlotGroup], device: torch.device) -> None:
        self.slot_groups = slot_groups
        by_slot = [sequence for group in slot_groups for sequence in group.allocator]
        ids: dict[Hashable, int] = {}
        adapter_ids = [ids.setdefault(one.request.adapter_key, len(ids)) for one in by_slot]
        order = np.argsort(np.array(adapter_ids, dtype=np.int64), kind="stable")
        self.sequences: list[SequenceState] = [by_slot[index] for index in order.tolist()]
        """In the order of the rows."""
        self.adapters = [sequence.request.adapter for sequence in self.sequences]
        self._order = order
        self.order: Tensor | None = None
        """The slot of each row, counted over all groups; None if rows are in slot order."""
        if (order[1:] < order[:-1]).any():
            self.order = torch.from_numpy(order).to(device)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def tokens(self) -> Numbers:
        """The last token of each row."""
        return np.array([sequence.tokens[-1] for sequence in self.sequences], dtype=np.int64)

    @property
    def positions(self) -> Numbers:
        """The position of each row's token."""
        if not self.slot_groups:
            return np.zeros(0, dtype=np.int64)
        return np.concatenate([group.positions for group in self.slot_groups])[self._order]


class ModelRunner:
    """Runs a hosted model for sampling."""

    def __init__(self, hosted_model: HostedModel) -> None:
        self._hosted_model = hosted_model

    def probe_kv_spec(self) -> KVCacheSpec:
        """Determine the KV shapes of the model's layers with a trial pass."""
        probe = KVShapeProbe()
        zero = torch.zeros(1, dtype=torch.long, device=self._hosted_model.device)
        with torch.inference_mode():
            self._hosted_model.hidden_states(zero, zero, ForwardContext(DecodeLora([]), probe))
        layers = [probe.shapes[layer] for layer in sorted(probe.shapes)]
        return KVCacheSpec(layers, self._hosted_model.dtype, self._hosted_model.device)

    def run(self, batch: DecodeBatch, chunks: Sequence[PrefillChunk]) -> Tensor:
        """The hidden states of all rows (T, D): decoding sequences, then prompt chunks."""
        tokens, positions = [batch.tokens], [batch.positions]
        adapters = [(adapter, 1) for adapter in batch.adapters]
        segments: list[AttentionSegment] = [
            DecodeRows(group.block, group.lengths, group.shared_prompt)
            for group in batch.slot_groups
        ]
        for prefill, num_tokens in chunks:
            start, stop = prefill.num_computed, prefill.num_computed + num_tokens
            tokens.append(prefill.tokens[start:stop])
            positions.append(np.arange(start, stop))
            adapters.append((prefill.request.adapter, num_tokens))
            segments.append(PrefillRows(prefill.prompt_kv, start, stop))
        context = ForwardContext(_lora_rows(adapters), CachedAttention(segments, batch.order))
        return self._hosted_model.hidden_states(
            self._to_tensor(tokens), self._to_tensor(positions), context
        )

    def logits(self, hidden_MD: Tensor, adapters: Iterable[SamplerAdapter | None]) -> Tensor:
        """The logits of rows with one adapter each."""
        rows = _lora_rows([(adapter, 1) for adapter in adapters])
        logits_MV, _ = self._hosted_model.lm_head.logits(hidden_MD, rows)
        return logits_MV

    def logits_for_adapter(self, adapter: SamplerAdapter | None, hidden_MD: Tensor) -> Tensor:
        """The logits of rows that share one adapter."""
        logits_MV, _ = self._hosted_model.lm_head.logits(
            hidden_MD, _lora_rows([(adapter, len(hidden_MD))])
        )
        return logits_MV

    def _to_tensor(self, parts: Sequence[Numbers]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._hosted_model.device)


def _lora_rows(adapters: Iterable[tuple[SamplerAdapter | None, int]]) -> DecodeLora:
    """Merge adjacent rows of the same adapter to spans; takes adapters with numbers of rows."""
    spans, start = [], 0
    for _, group in groupby(adapters, lambda pair: pair[0].key if pair[0] is not None else None):
        members = list(group)
        stop = start + sum(num_rows for _, num_rows in members)
        adapter = members[0][0]
        if adapter is not None:
            spans.append(AdapterSpan(start, stop, adapter))
        start = stop
    return DecodeLora(spans)
