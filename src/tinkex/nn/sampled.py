"""The low-rank part of rows that are sampled: few rows of each adapter, and nothing is trained.

Rows of one adapter lie together, and each adapter has its own few products. Copying all adapters
below each other, so that all rows could share the same products, was measured to be slower at rank
32: every row then meets every adapter.

Shape letters: M rows, K inputs, N outputs of all members, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.nn.running import Owner
from tinkex.nn.segments import add_product
from tinkex.nn.sites import LowRank

Numbers = npt.NDArray[np.int64]


class Adapter(Protocol):
    """An adapter to sample with."""

    @property
    def scale(self) -> float:
        """What the low-rank part is multiplied by."""
        ...

    @property
    def weights(self) -> Sequence[LowRank | None]:
        """The pairs by site."""
        ...


class Stretch(NamedTuple):
    """Rows of one adapter that lie together."""

    start: int
    stop: int
    adapter: Adapter


class SampledRows:
    """All rows of a pass, adapter by adapter; rows that no stretch names are the base model's."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = stretches

    def is_trained(self, site: int) -> bool:
        """Nothing is, while sampling."""
        return False

    def owners(self, num_rows: int) -> tuple[Numbers, Sequence[Owner]]:
        """Each row's adapter by its index in the list, -1 for none."""
        numbers = np.full(num_rows, -1, dtype=np.int64)
        for number, one in enumerate(self._stretches):
            numbers[one.start : one.stop] = number
        return numbers, [Owner(one.adapter.scale, one.adapter.weights) for one in self._stretches]

    def add(self, site: int, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add each adapter's part to its rows in place."""
        for start, stop, adapter in self._stretches:
            pair = adapter.weights[site]
            if pair is None:
                continue
            if start + 1 == stop and y_MN.dtype == pair.down.dtype:
                _add_to_one(pair, adapter.scale, x_MK[start], y_MN[start])
            else:
                _add_to_many(pair, adapter.scale, x_MK[start:stop], y_MN[start:stop])

    def pull(self, site: int, x_MK: Tensor, dy_MN: Tensor, kept: Any, dx_MK: Tensor | None) -> None:
        """There is nothing to gather."""
        raise AssertionError("rows that are sampled have no gradient")


def _add_to_many(pair: LowRank, scale: float, x_MK: Tensor, y_MN: Tensor) -> None:
    h = x_MK.to(pair.down.dtype) @ pair.down.t()
    if len(pair.ups) == 1:
        add_product(y_MN, h, pair.ups[0].t(), scale)
        return
    parts = y_MN.split([up.shape[0] for up in pair.ups], dim=1)
    for part, h_MR, up in zip(parts, h.chunk(len(pair.ups), dim=1), pair.ups, strict=True):
        add_product(part, h_MR, up.t(), scale)


def _add_to_one(pair: LowRank, scale: float, x_K: Tensor, y_N: Tensor) -> None:
    # A matrix times a vector is the memory's work alone, and has its own, faster, way.
    h = torch.mv(pair.down, x_K)
    if len(pair.ups) == 1:
        y_N.addmv_(pair.ups[0], h, alpha=scale)
        return
    parts = y_N.split([up.shape[0] for up in pair.ups])
    for part, h_R, up in zip(parts, h.chunk(len(pair.ups)), pair.ups, strict=True):
        part.addmv_(up, h_R, alpha=scale)
