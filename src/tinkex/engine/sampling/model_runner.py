"""One pass of a model over the next token of all samples, and over parts of prompts.

Shape letters: T rows, M rows that need logits, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Many
from itertools import groupby
from typing import NamedTuple

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
from tinkex.nn.hosted_model import HostedModel
from tinkex.nn.kv_cache import KVCacheSpec
from tinkex.nn.lora_decode import AdapterSpan, DecodeLora

Numbers = npt.NDArray[np.int64]


class PrefillChunk(NamedTuple):
    """The next tokens of a prompt."""

    prefill: PrefillProgress
    num_tokens: int


class DecodeBatch:
    """The samples that take a step together, those of one adapter beside each other."""

    def __init__(self, slot_groups: Many[SlotGroup], device: torch.device) -> None:
        self.slot_groups = slot_groups
        at_home = [one for room in slot_groups for one in room.allocator]
        numbers: dict[Hashable, int] = {}
        adapters = [numbers.setdefault(one.request.adapter_key, len(numbers)) for one in at_home]
        order = np.argsort(np.array(adapters, dtype=np.int64), kind="stable")
        self.sequences: list[SequenceState] = [at_home[index] for index in order.tolist()]
        """In the order of their rows."""
        self.adapters = [one.request.adapter for one in self.sequences]
        self._order = order
        self.order: Tensor | None = None
        """Which of the rooms' slots each row is; None if rows lie as slots do."""
        if (order[1:] < order[:-1]).any():
            self.order = torch.from_numpy(order).to(device)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def tokens(self) -> Numbers:
        """Each row's token."""
        return np.array([one.tokens[-1] for one in self.sequences], dtype=np.int64)

    @property
    def positions(self) -> Numbers:
        """Where each row's token stands."""
        if not self.slot_groups:
            return np.zeros(0, dtype=np.int64)
        return np.concatenate([room.positions for room in self.slot_groups])[self._order]


class ModelRunner:
    """Runs a hosted model for sampling."""

    def __init__(self, hosted_model: HostedModel) -> None:
        self._hosted_model = hosted_model

    def probe_kv_spec(self) -> KVCacheSpec:
        """What the model's layers keep of a token, found by trying."""
        probe = KVShapeProbe()
        zero = torch.zeros(1, dtype=torch.long, device=self._hosted_model.device)
        with torch.inference_mode():
            self._hosted_model.hidden_states(zero, zero, ForwardContext(DecodeLora([]), probe))
        layers = [probe.shapes[layer] for layer in sorted(probe.shapes)]
        return KVCacheSpec(layers, self._hosted_model.dtype, self._hosted_model.device)

    def run(self, batch: DecodeBatch, chunks: Many[PrefillChunk]) -> Tensor:
        """The hidden states of all rows: samples, then prompts, (T, D)."""
        tokens, positions = [batch.tokens], [batch.positions]
        adapters = [(adapter, 1) for adapter in batch.adapters]
        parts: list[AttentionSegment] = [
            DecodeRows(room.block, room.lengths, room.shared_prompt) for room in batch.slot_groups
        ]
        for fill, num_tokens in chunks:
            start, stop = fill.num_computed, fill.num_computed + num_tokens
            tokens.append(fill.tokens[start:stop])
            positions.append(np.arange(start, stop))
            adapters.append((fill.request.adapter, num_tokens))
            parts.append(PrefillRows(fill.prompt_kv, start, stop))
        this = ForwardContext(_lora_rows(adapters), CachedAttention(parts, batch.order))
        return self._hosted_model.hidden_states(
            self._to_tensor(tokens), self._to_tensor(positions), this
        )

    def logits(self, hidden_MD: Tensor, adapters: Iterable[SamplerAdapter | None]) -> Tensor:
        """The logits of rows, each with its own adapter."""
        rows = _lora_rows([(adapter, 1) for adapter in adapters])
        logits_MV, _ = self._hosted_model.lm_head.logits(hidden_MD, rows)
        return logits_MV

    def logits_for_adapter(self, adapter: SamplerAdapter | None, hidden_MD: Tensor) -> Tensor:
        """The logits of rows that are all of one adapter."""
        logits_MV, _ = self._hosted_model.lm_head.logits(
            hidden_MD, _lora_rows([(adapter, len(hidden_MD))])
        )
        return logits_MV

    def _to_tensor(self, parts: Many[Numbers]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._hosted_model.device)


def _lora_rows(adapters: Iterable[tuple[SamplerAdapter | None, int]]) -> DecodeLora:
    """Rows by their adapters and how many there are; neighbours of one adapter are one stretch."""
    stretches, start = [], 0
    for _, group in groupby(adapters, lambda one: one[0].key if one[0] is not None else None):
        mine = list(group)
        stop = start + sum(num for _, num in mine)
        adapter = mine[0][0]
        if adapter is not None:
            stretches.append(AdapterSpan(start, stop, adapter))
        start = stop
    return DecodeLora(stretches)
