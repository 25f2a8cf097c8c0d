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


class Part(StrEnum):
    """Which part of a model a site belongs to; clients choose parts to train."""

    ATTENTION = "attn"
    MLP = "mlp"
    UNEMBED = "unembed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Linear maps that read the same input; an adapter has a low-rank pair for each."""

    part: Part
    paths: tuple[str, ...]
    """The modules' names in the model."""
    in_features: int
    out_features: tuple[int, ...]
    num_experts: int = 0
    """Above 0 for a table of experts, each with its own pairs."""


class LowRank(NamedTuple):
    """One adapter's pairs at one site: y_i += scale * (x down_i^T) up_i^T.

    With experts, all tensors have a leading axis of E.
    """

    down: Tensor
    """The members' `A`, one below the other: (members * R, K)."""
    ups: tuple[Tensor, ...]
    """Each member's `B`: (N_i, R)."""


class _Place(NamedTuple):
    start: int
    shape: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + prod(self.shape)].view(self.shape)


class _Places(NamedTuple):
    down: _Place
    ups: tuple[_Place, ...]


class NamedPair(NamedTuple):
    """One module's pair, by the module's name."""

    path: str
    down: Tensor
    up: Tensor


class Layout:
    """Where the pairs of an adapter of some rank lie in its flat buffer."""

    def __init__(self, sites: Sequence[Site], rank: int, parts: Collection[Part]) -> None:
        self.sites = sites
        self.rank = rank
        self._places: list[_Places | None] = []
        self.size = 0
        """How many numbers the buffer has."""
        for site in sites:
            self._places.append(self._lay(site) if site.part in parts else None)

    @cached_property
    def num_parameters(self) -> int:
        """How many numbers are trained."""
        places = [place for places in self._places if places for place in _flatten(places)]
        return sum(prod(place.shape) for place in places)

    def views(self, flat: Tensor) -> list[LowRank | None]:
        """The pairs of every site as views of a buffer; None where the adapter has none."""
        return [
            LowRank(places.down.view(flat), tuple(place.view(flat) for place in places.ups))
            if places is not None
            else None
            for places in self._places
        ]

    def pairs(self, flat: Tensor) -> Iterator[NamedPair]:
        """The pairs module by module, as views of a buffer."""
        for site, pair in zip(self.sites, self.views(flat), strict=True):
            if pair is None:
                continue
            downs = pair.down.split(self.rank, dim=-2)
            for path, down, up in zip(site.paths, downs, pair.ups, strict=True):
                yield NamedPair(path, down, up)

    def new_weights(self, seed: int) -> Tensor:
        """The first weights of an adapter: `A` uniform, `B` zero, so that nothing changes yet."""
        flat = torch.zeros(self.size)
        dice = torch.Generator().manual_seed(seed & (2**63 - 1))
        for pair in self.views(flat):
            if pair is not None:
                bound = pair.down.shape[-1] ** -0.5
                pair.down.uniform_(-bound, bound, generator=dice)
        return flat

    def _lay(self, site: Site) -> _Places:
        lead = (site.num_experts,) if site.num_experts else ()
        down = self._place((*lead, len(site.paths) * self.rank, site.in_features))
        ups = tuple(self._place((*lead, size, self.rank)) for size in site.out_features)
        return _Places(down, ups)

    def _place(self, shape: tuple[int, ...]) -> _Place:
        start = self.size
        self.size = -(-(start + prod(shape)) // _ALIGNMENT) * _ALIGNMENT
        return _Place(start, shape)


def _flatten(places: _Places) -> tuple[_Place, ...]:
    return (places.down, *places.ups)
