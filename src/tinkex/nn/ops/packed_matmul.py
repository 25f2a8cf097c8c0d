"""A weight in panels, the way the kernels read it.

Shape letters: M rows, K inputs, N outputs, P panels, C columns of a panel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.nn.ops.library import GemmTask, LoraPairStruct, load_kernels

#: Columns of a panel, as the kernels have it.
PANEL_WIDTH = 16


def can_pack(weight: Tensor) -> bool:
    """Whether products with a weight can be computed here."""
    is_plain = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_plain and load_kernels() is not None


class PackedWeight:
    """A weight of K inputs and N outputs; the last panel is filled up with zeros."""

    def __init__(self, weight_KN: Tensor) -> None:
        found = load_kernels()
        assert found is not None, "panels are made only where they can be used"
        self._matmul = found.packed_matmul
        self.num_inputs, self.num_outputs = weight_KN.shape
        num_panels = -(-self.num_outputs // PANEL_WIDTH)
        self._panels_PKC = weight_KN.new_zeros(num_panels, self.num_inputs, PANEL_WIDTH)
        num_whole = self.num_outputs // PANEL_WIDTH
        whole_KN, rest_KC = weight_KN.tensor_split([num_whole * PANEL_WIDTH], dim=1)
        self._panels_PKC[:num_whole] = whole_KN.unflatten(1, (num_whole, PANEL_WIDTH)).transpose(
            0, 1
        )
        if num_whole < num_panels:
            self._panels_PKC[-1, :, : rest_KC.shape[1]] = rest_KC
        self.address = self._panels_PKC.data_ptr()
        self.num_bytes = self._panels_PKC.nbytes

    def weight_KN(self) -> Tensor:
        """The weight as it was given, in a new tensor."""
        return self._panels_PKC.transpose(0, 1).flatten(1)[:, : self.num_outputs]

    def matmul(
        self, x_MK: Tensor, bias_N: Tensor | None = None, out_MN: Tensor | None = None
    ) -> Tensor:
        """x W + b, in `out_MN` or a new tensor."""
        x_MK = _contiguous_rows(x_MK, self.num_inputs)
        if out_MN is None:
            out_MN = x_MK.new_empty(x_MK.shape[0], self.num_outputs)
        else:
            _check_output(out_MN, x_MK.shape[0], self.num_outputs)
        self._matmul(
            *(x_MK.data_ptr(), x_MK.stride(0), self.address),
            *(0 if bias_N is None else bias_N.data_ptr(), 0),
            *(out_MN.data_ptr(), out_MN.stride(0)),
            *(x_MK.shape[0], self.num_inputs, self.num_outputs),
            torch.get_num_threads(),
        )
        return out_MN


class PackedLoraPair:
    """The low-rank pairs of maps that read the same input, ready for rows that are sampled."""

    def __init__(self, down_RK: Tensor, ups: Sequence[Tensor], scale: float) -> None:
        found = load_kernels()
        assert found is not None, "panels are made only where they can be used"
        self._add_low_rank = found.add_low_rank
        self._down = PackedWeight(down_RK.t())
        self._ups = [PackedWeight(up.t() * scale) for up in ups]
        num = len(self._ups)
        self._addresses = (ctypes.c_void_p * num)(*(up.address for up in self._ups))
        self._sizes = (ctypes.c_long * num)(*(up.num_outputs for up in self._ups))
        self._num_outputs = sum(up.num_outputs for up in self._ups)
        self.num_bytes = sum(one.num_bytes for one in (self._down, *self._ups))

    def to_struct(self) -> LoraPairStruct:
        """As the kernel of a whole step reads it, for as long as this is here."""
        ups, sizes = ctypes.addressof(self._addresses), ctypes.addressof(self._sizes)
        return LoraPairStruct(
            self._down.address, ups, sizes, self._ups[0].num_inputs, len(self._ups)
        )

    def add(self, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add the low-rank part of all maps to y."""
        x_MK = _contiguous_rows(x_MK, self._down.num_inputs)
        _check_output(y_MN, x_MK.shape[0], self._num_outputs)
        is_done = self._add_low_rank(
            *(x_MK.data_ptr(), x_MK.stride(0), self._down.address),
            *(self._ups[0].num_inputs, len(self._ups), self._addresses, self._sizes),
            *(y_MN.data_ptr(), y_MN.stride(0), x_MK.shape[0], self._down.num_inputs),
            torch.get_num_threads(),
        )
        if not is_done:
            raise MemoryError("no memory for the low-rank part of a pass")


def _contiguous_rows(x_MK: Tensor, num_inputs: int) -> Tensor:
    """The same rows, the numbers of each beside each other; the kernels check nothing."""
    if x_MK.shape[1] != num_inputs or x_MK.dtype != torch.float32:
        raise RuntimeError(
            f"rows of {x_MK.shape[1]} {x_MK.dtype}, expected {num_inputs} of torch.float32"
        )
    return x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()


def _check_output(y_MN: Tensor, num_rows: int, num_outputs: int) -> None:
    is_fit = y_MN.shape == (num_rows, num_outputs) and y_MN.dtype == torch.float32
    if not is_fit or y_MN.stride(1) != 1:
        raise RuntimeError(
            f"{tuple(y_MN.shape)} {y_MN.dtype} cannot hold {num_rows} rows of {num_outputs} numbers"
        )


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
            found.run_gemm_tasks((GemmTask * len(jobs))(*jobs), len(jobs), torch.get_num_threads())
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
