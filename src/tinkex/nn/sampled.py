"""The low-rank part of rows that are sampled: few rows of each adapter, and nothing is trained.

Rows of one adapter lie together, and each adapter has its own few products. Copying all adapters
below each other, so that all rows could share the same products, was measured to be slower at rank
32: every row then meets every adapter.

Shape letters: M rows, K inputs, N outputs of all members, R rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.nn.native.batch import add_product
from tinkex.nn.native.panels import LowRankPanels, is_suited
from tinkex.nn.native.steps import Pair
from tinkex.nn.running import Owner
from tinkex.nn.sites import LowRank

Numbers = npt.NDArray[np.int64]


class SampledPair:
    """An adapter's pair at one site, for rows that are sampled."""

    def __init__(self, pair: LowRank, scale: float, *, has_panels: bool) -> None:
        self._pair, self._scale = pair, scale
        self.panels = LowRankPanels(pair.down, pair.ups, scale) if has_panels else None

    @property
    def num_bytes(self) -> int:
        """How much memory it takes beside the pair itself."""
        return 0 if self.panels is None else self.panels.num_bytes

    def add(self, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add the low-rank part to rows."""
        if self.panels is not None and y_MN.dtype == torch.float32:
            self.panels.add(x_MK, y_MN)
            return
        pair = self._pair
        h = x_MK.to(pair.down.dtype) @ pair.down.t()
        parts = y_MN.split([up.shape[0] for up in pair.ups], dim=1)
        for part, h_MR, up in zip(parts, h.chunk(len(pair.ups), dim=1), pair.ups, strict=True):
            add_product(part, h_MR, up.t(), self._scale)


class SampledPairs(Sequence[SampledPair | None]):
    """All pairs of an adapter, by site."""

    def __init__(self, pairs: Sequence[SampledPair | None]) -> None:
        self._pairs = pairs
        self._described: ctypes.Array[Pair] | None = None

    @overload
    def __getitem__(self, site: int) -> SampledPair | None: ...
    @overload
    def __getitem__(self, site: slice) -> Sequence[SampledPair | None]: ...
    def __getitem__(self, site: int | slice) -> Any:
        return self._pairs[site]

    def __len__(self) -> int:
        return len(self._pairs)

    def described(self, sites: Sequence[int]) -> int | None:
        """Where they are described for the kernel of a whole step; None if it cannot read them.

        An adapter is of one model, whose sites are always the same.
        """
        if self._described is None:
            pairs = [_described(self._pairs[site]) for site in sites]
            known = [pair for pair in pairs if pair is not None]
            if len(known) < len(pairs):
                return None
            self._described = (Pair * len(known))(*known)
        return ctypes.addressof(self._described)


def _described(pair: SampledPair | None) -> Pair | None:
    if pair is None:
        return Pair()
    return pair.panels.described() if pair.panels is not None else None


def sampled_pairs(
    weights: Sequence[LowRank | None], scale: float, dtype: torch.dtype
) -> SampledPairs:
    """The pairs of an adapter that does not change any more, by site, for rows of a model."""

    def ready(pair: LowRank) -> SampledPair:
        # Tables of experts have more than two dimensions, and are taken apart by who owns them.
        is_plain = pair.down.ndim == 2 and dtype == torch.float32
        return SampledPair(pair, scale, has_panels=is_plain and is_suited(pair.down))

    return SampledPairs([None if pair is None else ready(pair) for pair in weights])


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

    @property
    def pairs(self) -> SampledPairs:
        """The same, ready to be added."""
        ...


class Stretch(NamedTuple):
    """Rows of one adapter that lie together."""

    start: int
    stop: int
    adapter: Adapter


class SampledRows:
    """All rows of a pass, adapter by adapter; rows that no stretch names are the base model's."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches = stretches

    def is_trained(self, site: int) -> bool:
        """Nothing is, while sampling."""
        return False

    def owners(self, num_rows: int) -> tuple[Numbers, Sequence[Owner]]:
        """Each row's adapter by its index in the list, -1 for none."""
        numbers = np.full(num_rows, -1, dtype=np.int64)
        for number, one in enumerate(self.stretches):
            numbers[one.start : one.stop] = number
        return numbers, [Owner(one.adapter.scale, one.adapter.weights) for one in self.stretches]

    def add(self, site: int, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add each adapter's part to its rows in place."""
        for start, stop, adapter in self.stretches:
            pair = adapter.pairs[site]
            if pair is not None:
                pair.add(x_MK[start:stop], y_MN[start:stop])

    def pull(self, site: int, x_MK: Tensor, dy_MN: Tensor, kept: Any, dx_MK: Tensor | None) -> None:
        """There is nothing to gather."""
        raise AssertionError("rows that are sampled have no gradient")
