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

from tinkex.engine.sampling.adapter import SamplerAdapter
from tinkex.engine.sampling.cache import Room
from tinkex.engine.sampling.case import Fill, Sequence
from tinkex.nn.cached import CachedAttention, AttentionSegment, PrefillRows, DecodeRows, KVShapeProbe
from tinkex.nn.host import HostedModel
from tinkex.nn.kept import KVCacheSpec
from tinkex.nn.running import ForwardContext
from tinkex.nn.sampled import DecodeLora, AdapterSpan

Numbers = npt.NDArray[np.int64]


class Chunk(NamedTuple):
    """The next tokens of a prompt."""

    fill: Fill
    num_tokens: int


class Crew:
    """The samples that take a step together, those of one adapter beside each other."""

    def __init__(self, rooms: Many[Room], device: torch.device) -> None:
        self.rooms = rooms
        at_home = [one for room in rooms for one in room.roster]
        numbers: dict[Hashable, int] = {}
        adapters = [numbers.setdefault(one.case.key, len(numbers)) for one in at_home]
        order = np.argsort(np.array(adapters, dtype=np.int64), kind="stable")
        self.sequences: list[Sequence] = [at_home[index] for index in order.tolist()]
        """In the order of their rows."""
        self.adapters = [one.case.adapter for one in self.sequences]
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
        if not self.rooms:
            return np.zeros(0, dtype=np.int64)
        return np.concatenate([room.positions for room in self.rooms])[self._order]


class Passes:
    """Runs a hosted model for sampling."""

    def __init__(self, host: HostedModel) -> None:
        self._host = host

    def kind(self) -> KVCacheSpec:
        """What the model's layers keep of a token, found by trying."""
        probe = KVShapeProbe()
        zero = torch.zeros(1, dtype=torch.long, device=self._host.device)
        with torch.inference_mode():
            self._host.hidden_states(zero, zero, ForwardContext(DecodeLora([]), probe))
        layers = [probe.shapes[layer] for layer in sorted(probe.shapes)]
        return KVCacheSpec(layers, self._host.dtype, self._host.device)

    def run(self, crew: Crew, chunks: Many[Chunk]) -> Tensor:
        """The hidden states of all rows: samples, then prompts, (T, D)."""
        tokens, positions = [crew.tokens], [crew.positions]
        adapters = [(adapter, 1) for adapter in crew.adapters]
        parts: list[AttentionSegment] = [
            DecodeRows(room.block, room.lengths, room.shared) for room in crew.rooms
        ]
        for fill, num_tokens in chunks:
            start, stop = fill.num_done, fill.num_done + num_tokens
            tokens.append(fill.tokens[start:stop])
            positions.append(np.arange(start, stop))
            adapters.append((fill.case.adapter, num_tokens))
            parts.append(PrefillRows(fill.stored, start, stop))
        this = ForwardContext(_rows_of(adapters), CachedAttention(parts, crew.order))
        return self._host.hidden_states(self._tensor(tokens), self._tensor(positions), this)

    def logits(self, hidden_MD: Tensor, adapters: Iterable[SamplerAdapter | None]) -> Tensor:
        """The logits of rows, each with its own adapter."""
        rows = _rows_of([(adapter, 1) for adapter in adapters])
        logits_MV, _ = self._host.lm_head.logits(hidden_MD, rows)
        return logits_MV

    def logits_of(self, adapter: SamplerAdapter | None, hidden_MD: Tensor) -> Tensor:
        """The logits of rows that are all of one adapter."""
        logits_MV, _ = self._host.lm_head.logits(hidden_MD, _rows_of([(adapter, len(hidden_MD))]))
        return logits_MV

    def _tensor(self, parts: Many[Numbers]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._host.device)


def _rows_of(adapters: Iterable[tuple[SamplerAdapter | None, int]]) -> DecodeLora:
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
