"""LoRA layout: the A and B matrices of an adapter and their offsets in one flat buffer.

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

#: Tensors start at multiples of this many elements, so that SIMD loads are aligned.
_ALIGNMENT = 16


class TargetKind(StrEnum):
    """Part of a model that a LoRA target belongs to; clients choose which parts to train."""

    ATTENTION = "attn"
    MLP = "mlp"
    UNEMBED = "unembed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTarget:
    """Linear layers that read the same input; an adapter has A and B matrices for each."""

    kind: TargetKind
    paths: tuple[str, ...]
    """The modules' paths in the model."""
    in_features: int
    out_features: tuple[int, ...]
    num_experts: int = 0
    """Above 0 for MoE experts, each with its own A and B."""


class LoraPair(NamedTuple):
    """One adapter's A and B matrices at one target: y_i += scale * (x down_i^T) up_i^T.

    With experts, all tensors have a leading dimension E.
    """

    down: Tensor
    """The members' A, stacked: (members * R, K)."""
    ups: tuple[Tensor, ...]
    """Each member's B: (N_i, R)."""


class _BufferSlice(NamedTuple):
    start: int
    shape: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + prod(self.shape)].view(self.shape)


class _PairSlices(NamedTuple):
    down: _BufferSlice
    ups: tuple[_BufferSlice, ...]


class NamedLoraPair(NamedTuple):
    """A and B of one module, with the module's path."""

    path: str
    down: Tensor
    up: Tensor


class LoraLayout:
    """Offsets of an adapter's A and B matrices in its flat buffer.

    The kernels compute all members of a target together. If only some members are adapted, A and B
    of the others are zeros in every buffer: their update is zero, and so is their gradient.
    """

    def __init__(
        self,
        targets: Sequence[LoraTarget],
        rank: int,
        kinds: Collection[TargetKind],
        paths: Collection[str] | None = None,
    ) -> None:
        """Modules of these kinds are adapted, with `paths` only those."""
        self.targets = targets
        self.rank = rank
        self._paths = frozenset(
            path
            for target in targets
            if target.kind in kinds
            for path in target.paths
            if paths is None or path in paths
        )
        self._slices: list[_PairSlices | None] = []
        self.size = 0
        """Number of elements of the buffer, including alignment."""
        for target in targets:
            is_adapted = not self._paths.isdisjoint(target.paths)
            self._slices.append(self._allocate_target(target) if is_adapted else None)
        self._has_unadapted_members = any(
            pair is not None and not self._paths.issuperset(target.paths)
            for target, pair in zip(targets, self._slices, strict=True)
        )

    @cached_property
    def num_parameters(self) -> int:
        """Number of trained parameters."""
        flat = torch.empty(self.size, device="meta")
        return sum(pair.down.numel() + pair.up.numel() for pair in self.pairs(flat))

    def views(self, flat: Tensor) -> list[LoraPair | None]:
        """Return the pairs of all targets as views of a buffer; None for targets not adapted."""
        return [
            LoraPair(pair.down.view(flat), tuple(up.view(flat) for up in pair.ups))
            if pair is not None
            else None
            for pair in self._slices
        ]

    def pairs(self, flat: Tensor) -> Iterator[NamedLoraPair]:
        """Yield the pairs of the adapted modules as views of a buffer."""
        return (pair for pair in self._member_pairs(flat) if pair.path in self._paths)

    def clear_unadapted(self, flat: Tensor) -> None:
        """Set the members of targets that are not adapted to zero, in place."""
        if not self._has_unadapted_members:
            return
        for pair in self._member_pairs(flat):
            if pair.path not in self._paths:
                pair.down.zero_()
                pair.up.zero_()

    def _member_pairs(self, flat: Tensor) -> Iterator[NamedLoraPair]:
        for target, pair in zip(self.targets, self.views(flat), strict=True):
            if pair is None:
                continue
            downs = pair.down.split(self.rank, dim=-2)
            for path, down, up in zip(target.paths, downs, pair.ups, strict=True):
                yield NamedLoraPair(path, down, up)

    def init_weights(self, seed: int) -> Tensor:
        """Return initial weights: A uniform, B zero, so that the update starts at zero."""
        flat = torch.zeros(self.size)
        generator = torch.Generator().manual_seed(seed & (2**63 - 1))
        for pair in self.views(flat):
            if pair is not None:
                bound = pair.down.shape[-1] ** -0.5
                pair.down.uniform_(-bound, bound, generator=generator)
        self.clear_unadapted(flat)
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
