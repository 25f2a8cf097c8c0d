"""Matrix products that do not depend on each other: small ones run side by side.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.nn.native.library import Job, library

#: A product of more numbers keeps all threads busy by itself.
_MANY_PRODUCTS = 1 << 23


class _Product(NamedTuple):
    total_MN: Tensor
    left_MK: Tensor
    right_KN: Tensor
    scale: float
    is_added: bool


class Batch:
    """Products to do; how one is done depends on nothing but itself."""

    def __init__(self) -> None:
        self._products: list[_Product] = []

    def write(self, total_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
        """Let the total be left right, once the batch has run."""
        self._products.append(_Product(total_MN, left_MK, right_KN, 1.0, is_added=False))

    def add(self, total_MN: Tensor, left_MK: Tensor, right_KN: Tensor, scale: float) -> None:
        """Add scale * left right to the total, which may be of lower precision."""
        self._products.append(_Product(total_MN, left_MK, right_KN, scale, is_added=True))

    def run(self) -> None:
        """Do all of them."""
        found = library()
        jobs = []
        for one in self._products:
            if found is not None and _is_suited(one):
                jobs.append(_job(one))
            elif one.is_added:
                add_product(one.total_MN, one.left_MK, one.right_KN, one.scale)
            else:
                torch.mm(one.left_MK, one.right_KN, out=one.total_MN)
        if found is not None and jobs:
            found.run_jobs((Job * len(jobs))(*jobs), len(jobs), torch.get_num_threads())
        self._products.clear()


def add_product(total_MN: Tensor, left_MK: Tensor, right_KN: Tensor, scale: float) -> None:
    """total += scale * left right, where the total may be of lower precision."""
    if left_MK.dtype == total_MN.dtype:
        total_MN.addmm_(left_MK, right_KN, alpha=scale)
    else:
        total_MN.add_(left_MK @ right_KN, alpha=scale)


def _is_suited(one: _Product) -> bool:
    total_MN, left_MK, right_KN, _, _ = one
    return (
        left_MK.numel() * right_KN.shape[1] <= _MANY_PRODUCTS
        and total_MN.dtype == left_MK.dtype == right_KN.dtype == torch.float32
        and total_MN.stride(1) == 1
        and total_MN.device.type == "cpu"
    )


def _job(one: _Product) -> Job:
    total_MN, left_MK, right_KN, scale, is_added = one
    return Job(
        *(left_MK.data_ptr(), *left_MK.stride()),
        *(right_KN.data_ptr(), *right_KN.stride()),
        *(total_MN.data_ptr(), total_MN.stride(0)),
        *(*left_MK.shape, right_KN.shape[1]),
        *(scale, is_added),
    )
