"""Matrix products that do not depend on each other: small ones run side by side.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.nn.native.library import GemmTask, load_kernels

#: A product of more numbers keeps all threads busy by itself.
_MAX_KERNEL_PRODUCTS = 1 << 23


class _PendingMatmul(NamedTuple):
    out_MN: Tensor
    left_MK: Tensor
    right_KN: Tensor
    scale: float
    accumulate: bool


class MatmulBatch:
    """Products to do; how one is done depends on nothing but itself."""

    def __init__(self) -> None:
        self._pending: list[_PendingMatmul] = []

    def write(self, out_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
        """Let the total be left right, once the batch has run."""
        self._pending.append(_PendingMatmul(out_MN, left_MK, right_KN, 1.0, accumulate=False))

    def add(self, out_MN: Tensor, left_MK: Tensor, right_KN: Tensor, scale: float) -> None:
        """Add scale * left right to the total, which may be of lower precision."""
        self._pending.append(_PendingMatmul(out_MN, left_MK, right_KN, scale, accumulate=True))

    def run(self) -> None:
        """Do all of them."""
        found = load_kernels()
        jobs = []
        for one in self._pending:
            if found is not None and _can_use_kernel(one):
                jobs.append(_gemm_task(one))
            elif one.accumulate:
                add_matmul(one.out_MN, one.left_MK, one.right_KN, one.scale)
            else:
                torch.mm(one.left_MK, one.right_KN, out=one.out_MN)
        if found is not None and jobs:
            found.run_jobs((GemmTask * len(jobs))(*jobs), len(jobs), torch.get_num_threads())
        self._pending.clear()


def add_matmul(out_MN: Tensor, left_MK: Tensor, right_KN: Tensor, scale: float) -> None:
    """total += scale * left right, where the total may be of lower precision."""
    if left_MK.dtype == out_MN.dtype:
        out_MN.addmm_(left_MK, right_KN, alpha=scale)
    else:
        out_MN.add_(left_MK @ right_KN, alpha=scale)


def _can_use_kernel(one: _PendingMatmul) -> bool:
    total_MN, left_MK, right_KN, _, _ = one
    return (
        left_MK.numel() * right_KN.shape[1] <= _MAX_KERNEL_PRODUCTS
        and total_MN.dtype == left_MK.dtype == right_KN.dtype == torch.float32
        and total_MN.stride(1) == 1
        and total_MN.device.type == "cpu"
    )


def _gemm_task(one: _PendingMatmul) -> GemmTask:
    total_MN, left_MK, right_KN, scale, is_added = one
    return GemmTask(
        *(left_MK.data_ptr(), *left_MK.stride()),
        *(right_KN.data_ptr(), *right_KN.stride()),
        *(total_MN.data_ptr(), total_MN.stride(0)),
        *(*left_MK.shape, right_KN.shape[1]),
        *(scale, is_added),
    )
