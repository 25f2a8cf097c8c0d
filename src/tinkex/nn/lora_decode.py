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

from tinkex.nn.forward_context import BoundAdapter
from tinkex.nn.lora_layout import LoraPair
from tinkex.nn.ops.library import LoraPairStruct
from tinkex.nn.ops.packed_matmul import PackedLoraPair, add_matmul, can_pack

Numbers = npt.NDArray[np.int64]


class DecodeLoraPair:
    """An adapter's pair at one site, for rows that are sampled."""

    def __init__(self, pair: LoraPair, scale: float, *, is_packed: bool) -> None:
        self._pair, self._scale = pair, scale
        self.packed = PackedLoraPair(pair.down, pair.ups, scale) if is_packed else None

    @property
    def num_bytes(self) -> int:
        """How much memory it takes beside the pair itself."""
        return 0 if self.packed is None else self.packed.num_bytes

    def add(self, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add the low-rank part to rows."""
        if self.packed is not None and y_MN.dtype == torch.float32:
            self.packed.add(x_MK, y_MN)
            return
        pair = self._pair
        h = x_MK.to(pair.down.dtype) @ pair.down.t()
        parts = y_MN.split([up.shape[0] for up in pair.ups], dim=1)
        for part, h_MR, up in zip(parts, h.chunk(len(pair.ups), dim=1), pair.ups, strict=True):
            add_matmul(part, h_MR, up.t(), self._scale)


class DecodeLoraPairs(Sequence[DecodeLoraPair | None]):
    """All pairs of an adapter, by site."""

    def __init__(self, pairs: Sequence[DecodeLoraPair | None]) -> None:
        self._pairs = pairs
        self._structs: ctypes.Array[LoraPairStruct] | None = None

    @overload
    def __getitem__(self, site: int) -> DecodeLoraPair | None: ...
    @overload
    def __getitem__(self, site: slice) -> Sequence[DecodeLoraPair | None]: ...
    def __getitem__(self, site: int | slice) -> Any:
        return self._pairs[site]

    def __len__(self) -> int:
        return len(self._pairs)

    def struct_pointer(self, target_indices: Sequence[int]) -> int | None:
        """Where they are described for the kernel of a whole step; None if it cannot read them.

        An adapter is of one model, whose sites are always the same.
        """
        if self._structs is None:
            pairs = [_pair_struct(self._pairs[site]) for site in target_indices]
            known = [pair for pair in pairs if pair is not None]
            if len(known) < len(pairs):
                return None
            self._structs = (LoraPairStruct * len(known))(*known)
        return ctypes.addressof(self._structs)


def _pair_struct(pair: DecodeLoraPair | None) -> LoraPairStruct | None:
    if pair is None:
        return LoraPairStruct()
    return pair.packed.to_struct() if pair.packed is not None else None


def build_decode_pairs(
    weights: Sequence[LoraPair | None], scale: float, dtype: torch.dtype
) -> DecodeLoraPairs:
    """The pairs of an adapter that does not change any more, by site, for rows of a model."""

    def ready(pair: LoraPair) -> DecodeLoraPair:
        # Tables of experts have more than two dimensions, and are taken apart by who owns them.
        is_plain = pair.down.ndim == 2 and dtype == torch.float32
        return DecodeLoraPair(pair, scale, is_packed=is_plain and can_pack(pair.down))

    return DecodeLoraPairs([None if pair is None else ready(pair) for pair in weights])


class DecodeAdapter(Protocol):
    """An adapter to sample with."""

    @property
    def scale(self) -> float:
        """What the low-rank part is multiplied by."""
        ...

    @property
    def weights(self) -> Sequence[LoraPair | None]:
        """The pairs by site."""
        ...

    @property
    def pairs(self) -> DecodeLoraPairs:
        """The same, ready to be added."""
        ...


class AdapterSpan(NamedTuple):
    """Rows of one adapter that lie together."""

    start: int
    stop: int
    adapter: DecodeAdapter


class DecodeLora:
    """All rows of a pass, adapter by adapter; rows that no stretch names are the base model's."""

    def __init__(self, spans: Sequence[AdapterSpan]) -> None:
        self.spans = spans

    def is_trained(self, target_index: int) -> bool:
        """Nothing is, while sampling."""
        return False

    def adapters_by_row(self, num_rows: int) -> tuple[Numbers, Sequence[BoundAdapter]]:
        """Each row's adapter by its index in the list, -1 for none."""
        numbers = np.full(num_rows, -1, dtype=np.int64)
        for number, one in enumerate(self.spans):
            numbers[one.start : one.stop] = number
        return numbers, [BoundAdapter(one.adapter.scale, one.adapter.weights) for one in self.spans]

    def add(self, target_index: int, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add each adapter's part to its rows in place."""
        for start, stop, adapter in self.spans:
            pair = adapter.pairs[target_index]
            if pair is not None:
                pair.add(x_MK[start:stop], y_MN[start:stop])

    def backward(
        self, target_index: int, x_MK: Tensor, dy_MN: Tensor, saved: Any, dx_MK: Tensor | None
    ) -> None:
        """There is nothing to gather."""
        raise AssertionError("rows that are sampled have no gradient")
