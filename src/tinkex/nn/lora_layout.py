"""The shape of an adapter: which low-rank pairs it has, and where they lie in one flat buffer.

Shape letters: K inputs, N outputs, R rank, E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

#: Every tensor of an adapter begins at a multiple of so many numbers, as fast kernels like it.
_ALIGNMENT = 16


class TargetKind(StrEnum):
    """Which part of a model a site belongs to; clients choose parts to train."""

    ATTENTION = "attn"
    MLP = "mlp"
    UNEMBED = "unembed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTarget:
    """Linear maps that read the same input; an adapter has a low-rank pair for each."""

    kind: TargetKind
    paths: tuple[str, ...]
    """The modules' names in the model."""
    in_features: int
    out_features: tuple[int, ...]
    num_experts: int = 0
    """Above 0 for a table of experts, each with its own pairs."""


class LoraPair(NamedTuple):
    """One adapter's pairs at one site: y_i += scale * (x down_i^T) up_i^T.

    With experts, all tensors have a leading axis of E.
    """

    down: Tensor
    """The members' `A`, one below the other: (members * R, K)."""
    ups: tuple[Tensor, ...]
    """Each member's `B`: (N_i, R)."""


class _BufferSlice(NamedTuple):
    start: int
    shape: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + prod(self.shape)].view(self.shape)


class _PairSlices(NamedTuple):
    down: _BufferSlice
    ups: tuple[_BufferSlice, ...]


class NamedLoraPair(NamedTuple):
    """One module's pair, by the module's name."""

    path: str
    down: Tensor
    up: Tensor


class LoraLayout:
    """Where the pairs of an adapter of some rank lie in its flat buffer."""

    def __init__(
        self, targets: Sequence[LoraTarget], rank: int, kinds: Collection[TargetKind]
    ) -> None:
        self.targets = targets
        self.rank = rank
        self._slices: list[_PairSlices | None] = []
        self.size = 0
        """How many numbers the buffer has."""
        for site in targets:
            self._slices.append(self._allocate_target(site) if site.kind in kinds else None)

    @cached_property
    def num_parameters(self) -> int:
        """How many numbers are trained."""
        places = [place for places in self._slices if places for place in _flatten(places)]
        return sum(prod(place.shape) for place in places)

    def views(self, flat: Tensor) -> list[LoraPair | None]:
        """The pairs of every site as views of a buffer; None where the adapter has none."""
        return [
            LoraPair(places.down.view(flat), tuple(place.view(flat) for place in places.ups))
            if places is not None
            else None
            for places in self._slices
        ]

    def pairs(self, flat: Tensor) -> Iterator[NamedLoraPair]:
        """The pairs module by module, as views of a buffer."""
        for site, pair in zip(self.targets, self.views(flat), strict=True):
            if pair is None:
                continue
            downs = pair.down.split(self.rank, dim=-2)
            for path, down, up in zip(site.paths, downs, pair.ups, strict=True):
                yield NamedLoraPair(path, down, up)

    def init_weights(self, seed: int) -> Tensor:
        """The first weights of an adapter: `A` uniform, `B` zero, so that nothing changes yet."""
        flat = torch.zeros(self.size)
        dice = torch.Generator().manual_seed(seed & (2**63 - 1))
        for pair in self.views(flat):
            if pair is not None:
                bound = pair.down.shape[-1] ** -0.5
                pair.down.uniform_(-bound, bound, generator=dice)
        return flat

    def _allocate_target(self, target: LoraTarget) -> _PairSlices:
        lead = (target.num_experts,) if target.num_experts else ()
        down = self._allocate((*lead, len(target.paths) * self.rank, target.in_features))
        ups = tuple(self._allocate((*lead, size, self.rank)) for size in target.out_features)
        return _PairSlices(down, ups)

    def _allocate(self, shape: tuple[int, ...]) -> _BufferSlice:
        start = self.size
        self.size = -(-(start + prod(shape)) // _ALIGNMENT) * _ALIGNMENT
        return _BufferSlice(start, shape)


def _flatten(slices: _PairSlices) -> tuple[_BufferSlice, ...]:
    return (slices.down, *slices.ups)
