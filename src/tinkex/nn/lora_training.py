"""LoRA of training passes: consecutive rows per adapter, forward and backward.

The low-rank update is computed in the adapter's precision, regardless of the base model's.

Shape letters: M rows, m rows of one adapter, K inputs, N outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.nn.forward_context import BoundAdapter, SavedLora
from tinkex.nn.lora_layout import LoraPair
from tinkex.nn.ops.packed_matmul import MatmulBatch


class LoraSegment(NamedTuple):
    """The rows of one adapter, from `start` up to `stop`."""

    start: int
    stop: int
    scale: float
    """Factor of the low-rank update."""
    weights: Sequence[LoraPair | None]
    """The adapter's A and B matrices by target index."""
    gradient: Sequence[LoraPair | None] | None = None
    """Buffers that accumulate its gradient; None if it is not trained."""
    expert: int | None = None
    """Index of the expert at targets with experts."""


class SegmentedLora:
    """Adapters of all rows of a pass; rows outside all segments use the base model alone."""

    def __init__(self, segments: Sequence[LoraSegment]) -> None:
        self._segments = segments

    def select_rows(self, rows: npt.NDArray[np.int64]) -> SegmentedLora:
        """Return the same adapters for a subset of the rows, given in ascending order."""
        return SegmentedLora(
            [
                one._replace(
                    start=int(np.searchsorted(rows, one.start)),
                    stop=int(np.searchsorted(rows, one.stop)),
                )
                for one in self._segments
            ]
        )

    def adapters_by_row(
        self, num_rows: int
    ) -> tuple[npt.NDArray[np.int64], Sequence[BoundAdapter]]:
        """Return the index of each row's adapter in the returned list, -1 for none."""
        indices = np.full(num_rows, -1, dtype=np.int64)
        for index, one in enumerate(self._segments):
            indices[one.start : one.stop] = index
        return indices, [
            BoundAdapter(one.scale, one.weights, one.gradient) for one in self._segments
        ]

    def is_trained(self, target_index: int) -> bool:
        """Whether any adapter needs a gradient at this target."""
        return any(
            one.gradient is not None and one.gradient[target_index] for one in self._segments
        )

    def add(self, target_index: int, x_MK: Tensor, y_MN: Tensor) -> SavedLora:
        """Add each adapter's low-rank update to its rows; returns x down^T for `backward`."""
        downs, ups = MatmulBatch(), MatmulBatch()
        saved = [_queue_forward(s, target_index, x_MK, y_MN, downs, ups) for s in self._segments]
        downs.run()
        ups.run()
        return saved

    def backward(
        self,
        target_index: int,
        x_MK: Tensor,
        dy_MN: Tensor,
        saved: SavedLora,
        dx_MK: Tensor | None,
    ) -> None:
        """Accumulate each adapter's gradient, and the input's if `dx_MK` is given."""
        ups, downs = MatmulBatch(), MatmulBatch()
        for one, h_mR in zip(self._segments, saved, strict=True):
            if h_mR is not None:
                _queue_backward(one, target_index, (x_MK, dy_MN, h_mR, dx_MK), ups, downs)
        ups.run()
        downs.run()


def _pair_at(
    one: LoraSegment, pairs: Sequence[LoraPair | None] | None, target_index: int
) -> LoraPair | None:
    pair = pairs[target_index] if pairs is not None else None
    if pair is None or one.expert is None:
        return pair
    return LoraPair(pair.down[one.expert], tuple(up[one.expert] for up in pair.ups))


def _queue_forward(
    one: LoraSegment,
    target_index: int,
    x_MK: Tensor,
    y_MN: Tensor,
    downs: MatmulBatch,
    ups: MatmulBatch,
) -> Tensor | None:
    pair = _pair_at(one, one.weights, target_index)
    if pair is None or one.start == one.stop:
        return None
    y_mN, x_mK = y_MN[one.start : one.stop], x_MK[one.start : one.stop].to(pair.down.dtype)
    h_mR = x_mK.new_empty(len(x_mK), len(pair.down))
    downs.write(h_mR, x_mK, pair.down.t())
    offset, rank = 0, pair.ups[0].shape[-1]
    for index, up in enumerate(pair.ups):
        h_part = h_mR[:, index * rank : (index + 1) * rank]
        ups.add(y_mN[:, offset : offset + up.shape[0]], h_part, up.t(), one.scale)
        offset += up.shape[0]
    return h_mR


def _queue_backward(
    one: LoraSegment,
    target_index: int,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    ups: MatmulBatch,
    downs: MatmulBatch,
) -> None:
    x_MK, dy_MN, h_mR, dx_MK = tensors
    pair, gradient = (
        _pair_at(one, one.weights, target_index),
        _pair_at(one, one.gradient, target_index),
    )
    assert pair is not None, "forward saved h only where a pair exists"
    dy_mN = dy_MN[one.start : one.stop].to(h_mR.dtype)
    dh_mR = torch.empty_like(h_mR)
    offset, rank = 0, pair.ups[0].shape[-1]
    for index, up in enumerate(pair.ups):
        dy_part = dy_mN[:, offset : offset + up.shape[0]]
        columns = slice(index * rank, (index + 1) * rank)
        ups.write(dh_mR[:, columns], dy_part, up)
        if gradient is not None:
            ups.add(gradient.ups[index], dy_part.t(), h_mR[:, columns], one.scale)
        offset += up.shape[0]
    if gradient is not None:
        x_mK = x_MK[one.start : one.stop].to(h_mR.dtype)
        downs.add(gradient.down, dh_mR.t(), x_mK, one.scale)
    if dx_MK is not None:
        downs.add(dx_MK[one.start : one.stop], dh_mR, pair.down, one.scale)
