"""Weights to sample with, on top of a base model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.nn.sites import LowRank


@dataclass(frozen=True, slots=True, eq=False)
class SamplerAdapter:
    """An adapter's pairs; they must not change while it is sampled from."""

    key: Hashable
    """Equal keys mean equal weights: what was computed with one holds for the other."""
    scale: float
    """What the low-rank part is multiplied by."""
    weights: Sequence[LowRank | None] = field(repr=False)
    """The pairs by site."""
