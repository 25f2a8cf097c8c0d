"""LoRA of decode and prefill passes: few rows per adapter and no gradients.

Rows of one adapter are consecutive, and each adapter runs its own products. Stacking all adapters
into one product was slower at rank 32, because every row is then multiplied by every adapter.

Shape letters: M rows, K inputs, N outputs of all members, R rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.nn.forward_context import BoundAdapter, SavedLora
from tinkex.nn.lora_layout import LoraPair
from tinkex.nn.ops.library import LoraPairStruct
from tinkex.nn.ops.packed_matmul import PackedLoraPair, add_matmul, can_pack

Indices = npt.NDArray[np.int64]


class DecodeLoraPair:
    """An adapter's A and B matrices at one target, packed if the kernels can use them."""

    def __init__(self, pair: LoraPair, scale: float, *, is_packed: bool) -> None:
        self._pair, self._scale = pair, scale
        self.packed = PackedLoraPair(pair.down, pair.ups, scale) if is_packed else None

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed copy."""
        return 0 if self.packed is None else self.packed.num_bytes

    def add(self, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add the low-rank update to `y_MN` in place."""
        if self.packed is not None and y_MN.dtype == torch.float32:
            self.packed.add(x_MK, y_MN)
            return
        pair = self._pair
        h = x_MK.to(pair.down.dtype) @ pair.down.t()
        parts = y_MN.split([up.shape[0] for up in pair.ups], dim=1)
        for part, h_MR, up in zip(parts, h.chunk(len(pair.ups), dim=1), pair.ups, strict=True):
            add_matmul(part, h_MR, up.t(), self._scale)


class DecodeLoraPairs(Sequence[DecodeLoraPair | None]):
    """All pairs of an adapter by target index."""

    def __init__(self, pairs: Sequence[DecodeLoraPair | None]) -> None:
        self._pairs = pairs
        self._structs: ctypes.Array[LoraPairStruct] | None = None

    @overload
    def __getitem__(self, index: int) -> DecodeLoraPair | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DecodeLoraPair | None]: ...
    def __getitem__(
        self, index: int | slice
    ) -> DecodeLoraPair | Sequence[DecodeLoraPair | None] | None:
        return self._pairs[index]

    def __len__(self) -> int:
        return len(self._pairs)

    def struct_pointer(self, target_indices: Sequence[int]) -> int | None:
        """Address of the pairs' structs for the fused decode kernel; None if one is not packed.

        The structs are built once: an adapter belongs to one model, whose targets do not change.
        """
        if self._structs is None:
            structs = [_pair_struct(self._pairs[index]) for index in target_indices]
            packed = [struct for struct in structs if struct is not None]
            if len(packed) < len(structs):
                return None
            self._structs = (LoraPairStruct * len(packed))(*packed)
        return ctypes.addressof(self._structs)


def _pair_struct(pair: DecodeLoraPair | None) -> LoraPairStruct | None:
    if pair is None:
        return LoraPairStruct()
    return pair.packed.to_struct() if pair.packed is not None else None


def build_decode_pairs(
    weights: Sequence[LoraPair | None], scale: float, dtype: torch.dtype
) -> DecodeLoraPairs:
    """Prepare an adapter's final weights for sampling with a model of this dtype."""

    def prepare(pair: LoraPair) -> DecodeLoraPair:
        # Pairs with experts have three dimensions; `moe_experts` selects single experts from them.
        is_plain = pair.down.ndim == 2 and dtype == torch.float32
        return DecodeLoraPair(pair, scale, is_packed=is_plain and can_pack(pair.down))

    return DecodeLoraPairs([None if pair is None else prepare(pair) for pair in weights])


class DecodeAdapter(Protocol):
    """An adapter to sample with."""

    @property
    def scale(self) -> float:
        """Factor of the low-rank update."""
        ...

    @property
    def weights(self) -> Sequence[LoraPair | None]:
        """The A and B matrices by target index."""
        ...

    @property
    def pairs(self) -> DecodeLoraPairs:
        """The weights, prepared for decoding."""
        ...


class AdapterSpan(NamedTuple):
    """Consecutive rows of one adapter."""

    start: int
    stop: int
    adapter: DecodeAdapter


class DecodeLora:
    """Adapters of all rows of a pass; rows outside all spans use the base model alone."""

    def __init__(self, spans: Sequence[AdapterSpan]) -> None:
        self.spans = spans

    def is_trained(self, target_index: int) -> bool:
        """Return False: sampling has no gradients."""
        return False

    def adapters_by_row(self, num_rows: int) -> tuple[Indices, Sequence[BoundAdapter]]:
        """Return the index of each row's adapter in the returned list, -1 for none."""
        indices = np.full(num_rows, -1, dtype=np.int64)
        for index, one in enumerate(self.spans):
            indices[one.start : one.stop] = index
        return indices, [BoundAdapter(one.adapter.scale, one.adapter.weights) for one in self.spans]

    def add(self, target_index: int, x_MK: Tensor, y_MN: Tensor) -> SavedLora:
        """Add each adapter's low-rank update to its rows in place."""
        for start, stop, adapter in self.spans:
            pair = adapter.pairs[target_index]
            if pair is not None:
                pair.add(x_MK[start:stop], y_MN[start:stop])
        return ()

    def backward(
        self, target_index: int, x_MK: Tensor, dy_MN: Tensor, saved: SavedLora, dx_MK: Tensor | None
    ) -> None:
        """Raise: sampling has no gradients."""
        raise AssertionError("decode passes have no gradient")
