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

from tinkex.nn.native.batch import add_product
from tinkex.nn.native.panels import LowRankPanels, is_suited
from tinkex.nn.running import Owner
from tinkex.nn.sites import LowRank

Numbers = npt.NDArray[np.int64]


class SampledPair:
    """An adapter's pair at one site, for rows that are sampled."""

    def __init__(self, pair: LowRank, scale: float, *, has_panels: bool) -> None:
        self._pair, self._scale = pair, scale
        self._panels = LowRankPanels(pair.down, pair.ups, scale) if has_panels else None

    @property
    def num_bytes(self) -> int:
        """How much memory it takes beside the pair itself."""
        return 0 if self._panels is None else self._panels.num_bytes

    def add(self, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add the low-rank part to rows."""
        if self._panels is not None and y_MN.dtype == torch.float32:
            self._panels.add(x_MK, y_MN)
            return
        pair = self._pair
        h = x_MK.to(pair.down.dtype) @ pair.down.t()
        parts = y_MN.split([up.shape[0] for up in pair.ups], dim=1)
        for part, h_MR, up in zip(parts, h.chunk(len(pair.ups), dim=1), pair.ups, strict=True):
            add_product(part, h_MR, up.t(), self._scale)


def sampled_pairs(
    weights: Sequence[LowRank | None], scale: float, dtype: torch.dtype
) -> list[SampledPair | None]:
    """The pairs of an adapter that does not change any more, by site, for rows of a model."""

    def ready(pair: LowRank) -> SampledPair:
        # Tables of experts have more than two dimensions, and are taken apart by who owns them.
        is_plain = pair.down.ndim == 2 and dtype == torch.float32
        return SampledPair(pair, scale, has_panels=is_plain and is_suited(pair.down))

    return [None if pair is None else ready(pair) for pair in weights]


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
    def pairs(self) -> Sequence[SampledPair | None]:
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
            pair = adapter.pairs[site]
            if pair is not None:
                pair.add(x_MK[start:stop], y_MN[start:stop])

    def pull(self, site: int, x_MK: Tensor, dy_MN: Tensor, kept: Any, dx_MK: Tensor | None) -> None:
        """There is nothing to gather."""
        raise AssertionError("rows that are sampled have no gradient")
