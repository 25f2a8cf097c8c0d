"""One pass of a model over the next token of all samples, and over parts of prompts.

Shape letters: T rows, M rows that need logits, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.sampling.adapter import SamplerAdapter
from tinkex.engine.sampling.cache import Room
from tinkex.engine.sampling.case import Fill
from tinkex.nn.cached import CachedAttention, Part, PromptRows, SampleRows, ShapeProbe
from tinkex.nn.host import Host
from tinkex.nn.kept import Kind
from tinkex.nn.running import LowRankRows, Pass
from tinkex.nn.segments import Segment, Segments
from tinkex.nn.stacked import OneAdapter, Owned, ScatteredRows, SplitRows, Stack

_BASE = Segments([])


class Chunk(NamedTuple):
    """The next tokens of a prompt."""

    fill: Fill
    num_tokens: int


class Passes:
    """Runs a hosted model for sampling."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._stack = Stack(host.sites, host.device)
        self._known: tuple[object, LowRankRows] | None = None

    def kind(self) -> Kind:
        """What the model's layers keep of a token, found by trying."""
        probe = ShapeProbe()
        zero = torch.zeros(1, dtype=torch.long, device=self._host.device)
        self._host.hidden(zero, zero, Pass(_BASE, probe))
        layers = [probe.shapes[layer] for layer in sorted(probe.shapes)]
        return Kind(layers, self._host.dtype, self._host.device)

    def clear(self) -> None:
        """Forget copies of adapters."""
        self._known = None
        self._stack.clear()

    def run(self, rooms: Many[Room], chunks: Many[Chunk], version: int) -> Tensor:
        """The hidden states of all rows: samples room by room, then prompts, (T, D)."""
        tokens = [
            np.array([one.tokens[-1] for room in rooms for one in room.roster], dtype=np.int64)
        ]
        positions = [room.positions for room in rooms]
        parts: list[Part] = [SampleRows(room.block, room.lengths, room.shared) for room in rooms]
        for fill, num_tokens in chunks:
            start, stop = fill.num_done, fill.num_done + num_tokens
            tokens.append(fill.tokens[start:stop])
            positions.append(np.arange(start, stop))
            parts.append(PromptRows(fill.stored, start, stop))
        this = Pass(self._rows(rooms, chunks, version), CachedAttention(parts))
        return self._host.hidden(self._tensor(tokens), self._tensor(positions), this)

    def logits(
        self,
        hidden_MD: Tensor,
        owners: Many[SamplerAdapter | None],
        version: int | None = None,
    ) -> Tensor:
        """The logits of rows, each with its own adapter; with a version, of all samples."""
        rows = self._rows_of(owners) if version is None else self._samples_rows(owners, version)
        logits_MV, _ = self._host.head.logits(hidden_MD, rows)
        return logits_MV

    def logits_of(self, adapter: SamplerAdapter | None, hidden_MD: Tensor) -> Tensor:
        """The logits of rows that are all of one adapter."""
        logits_MV, _ = self._host.head.logits(hidden_MD, _alone(adapter))
        return logits_MV

    # --- whose rows are whose ------------------------------------------------------------------
    def _rows(self, rooms: Many[Room], chunks: Many[Chunk], version: int) -> LowRankRows:
        owners = [one.case.adapter for room in rooms for one in room.roster]
        filled = [fill.case.adapter for fill, _ in chunks]
        first = (owners + filled)[0]
        if all(_is_same(one, first) for one in owners + filled):
            return _alone(first)
        if not chunks:
            return self._samples_rows(owners, version)
        prompts = _segments(chunks)
        if not owners:
            return prompts
        return SplitRows(len(owners), self._samples_rows(owners, version), prompts)

    def _samples_rows(self, owners: Many[SamplerAdapter | None], version: int) -> LowRankRows:
        """The rows of samples, which stay as they are while nobody comes or goes."""
        if self._known is None or self._known[0] != version:
            self._known = (version, self._rows_of(owners))
        return self._known[1]

    def _rows_of(self, owners: Many[SamplerAdapter | None]) -> LowRankRows:
        if all(_is_same(one, owners[0]) for one in owners):
            return _alone(owners[0])
        owned = Owned.of(owners)
        if self._stack.hold(owned.adapters):
            return self._stack.rows(owned)
        return ScatteredRows(owned)

    def _tensor(self, parts: Many[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._host.device)


def _is_same(one: SamplerAdapter | None, other: SamplerAdapter | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or one.key == other.key


def _alone(adapter: SamplerAdapter | None) -> LowRankRows:
    return _BASE if adapter is None else OneAdapter(adapter)


def _segments(chunks: Many[Chunk]) -> Segments:
    segments, start = [], 0
    for fill, num_tokens in chunks:
        adapter = fill.case.adapter
        if adapter is not None:
            stop = start + num_tokens
            segments.append(Segment(start, stop, adapter.scale, adapter.weights))
        start += num_tokens
    return Segments(segments)
