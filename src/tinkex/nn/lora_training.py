"""Rows that lie together by adapter, as a training pass has them.

The low-rank part is computed in the adapter's own precision, whatever the base model's is.

Shape letters: M rows, m rows of one adapter, K inputs, N outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.nn.forward_context import BoundAdapter
from tinkex.nn.lora_layout import LoraPair
from tinkex.nn.ops.packed_matmul import MatmulBatch


class LoraSegment(NamedTuple):
    """The rows of one adapter, from `start` up to `stop`."""

    start: int
    stop: int
    scale: float
    """What the low-rank part is multiplied by: alpha / rank."""
    weights: Sequence[LoraPair | None]
    """The adapter's pairs by site."""
    gradient: Sequence[LoraPair | None] | None = None
    """Where its gradient is gathered; None if it is not trained."""
    expert: int | None = None
    """Which expert's pairs, where the pairs are tables of experts."""


class SegmentedLora:
    """All rows of a pass, adapter by adapter; rows that no segment names are the base model's."""

    def __init__(self, segments: Sequence[LoraSegment]) -> None:
        self._segments = segments

    def select_rows(self, rows: npt.NDArray[np.int64]) -> SegmentedLora:
        """The same adapters on some of the rows, which are given in ascending order."""
        return SegmentedLora(
            [
                one._replace(
                    start=int(np.searchsorted(rows, one.start)),
                    stop=int(np.searchsorted(rows, one.stop)),
                )
                for one in self._segments
            ]
        )

    def select_saved(
        self, saved: Sequence[Tensor | None], rows: npt.NDArray[np.int64]
    ) -> list[Tensor | None]:
        """What `add` kept, for some of the rows, which are given in ascending order."""
        return [
            None if h_mR is None else _select_saved_rows(one, h_mR, rows)
            for one, h_mR in zip(self._segments, saved, strict=True)
        ]

    def adapters_by_row(
        self, num_rows: int
    ) -> tuple[npt.NDArray[np.int64], Sequence[BoundAdapter]]:
        """Each row's adapter by its index in the list, -1 for none."""
        numbers = np.full(num_rows, -1, dtype=np.int64)
        for number, one in enumerate(self._segments):
            numbers[one.start : one.stop] = number
        return numbers, [
            BoundAdapter(one.scale, one.weights, one.gradient) for one in self._segments
        ]

    def is_trained(self, target_index: int) -> bool:
        """Whether any adapter wants a gradient here."""
        return any(
            one.gradient is not None and one.gradient[target_index] for one in self._segments
        )

    def add(self, target_index: int, x_MK: Tensor, y_MN: Tensor) -> list[Tensor | None]:
        """Add each adapter's part to its rows; keeps x down^T for `pull`."""
        downs, ups = MatmulBatch(), MatmulBatch()
        kept = [_queue_forward(one, target_index, x_MK, y_MN, downs, ups) for one in self._segments]
        downs.run()
        ups.run()
        return kept

    def backward(
        self,
        target_index: int,
        x_MK: Tensor,
        dy_MN: Tensor,
        saved: Sequence[Tensor | None],
        dx_MK: Tensor | None,
    ) -> None:
        """Gather each adapter's gradient from its rows."""
        ups, downs = MatmulBatch(), MatmulBatch()
        for one, h_mR in zip(self._segments, saved, strict=True):
            if h_mR is not None:
                _queue_backward(one, target_index, (x_MK, dy_MN, h_mR, dx_MK), ups, downs)
        ups.run()
        downs.run()


def _select_saved_rows(one: LoraSegment, h_mR: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
    mine = rows[(rows >= one.start) & (rows < one.stop)] - one.start
    return h_mR.index_select(0, torch.from_numpy(mine).to(h_mR.device))


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
    at, rank = 0, pair.ups[0].shape[-1]
    for index, up in enumerate(pair.ups):
        h_part = h_mR[:, index * rank : (index + 1) * rank]
        ups.add(y_mN[:, at : at + up.shape[0]], h_part, up.t(), one.scale)
        at += up.shape[0]
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
    assert pair is not None  # or there would be no h
    dy_mN = dy_MN[one.start : one.stop].to(h_mR.dtype)
    dh_mR = torch.empty_like(h_mR)
    at, rank = 0, pair.ups[0].shape[-1]
    for index, up in enumerate(pair.ups):
        dy_part = dy_mN[:, at : at + up.shape[0]]
        mine = slice(index * rank, (index + 1) * rank)
        ups.write(dh_mR[:, mine], dy_part, up)
        if gradient is not None:
            ups.add(gradient.ups[index], dy_part.t(), h_mR[:, mine], one.scale)
        at += up.shape[0]
    if gradient is not None:
        x_mK = x_MK[one.start : one.stop].to(h_mR.dtype)
        downs.add(gradient.down, dh_mR.t(), x_mK, one.scale)
    if dx_MK is not None:
        downs.add(dx_MK[one.start : one.stop], dh_mR, pair.down, one.scale)
