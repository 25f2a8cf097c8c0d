"""Weights to sample with, on top of a base model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from tinkex.nn.sampled import DecodeLoraPairs, build_decode_pairs
from tinkex.nn.sites import LoraPair


@dataclass(frozen=True, slots=True, eq=False)
class SamplerAdapter:
    """An adapter's pairs; they must not change while it is sampled from."""

    key: Hashable
    """Equal keys mean equal weights: what was computed with one holds for the other."""
    scale: float
    """What the low-rank part is multiplied by."""
    weights: Sequence[LoraPair | None] = field(repr=False)
    """The pairs by site."""
    dtype: torch.dtype = torch.float32
    """What the base model computes with."""
    pairs: DecodeLoraPairs = field(init=False, repr=False)
    """The pairs again, ready to be added to rows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", build_decode_pairs(self.weights, self.scale, self.dtype))

    @property
    def num_bytes(self) -> int:
        """How much memory the pairs take that are ready, beside the weights themselves."""
        return sum(pair.num_bytes for pair in self.pairs if pair is not None)
