"""Matrix products with packed weights, and batches of small products.

A packed weight is stored in panels of PANEL_WIDTH columns, in the order in which the kernel reads
it. A weight whose numbers are all exact in a 16-bit type is stored in that type; the kernel widens
them where it uses them, so results are the same bits as in float32.

Shape letters: M rows, K inputs, N outputs, P panels, C columns of a panel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.nn.ops.library import LANES, GemmTask, LoraPairStruct, PackedWeightStruct, load_kernels

#: Columns of a panel (PANEL in `kernels.h`).
PANEL_WIDTH = 16
#: Larger products keep all threads busy alone, and torch runs them faster.
_MAX_KERNEL_PRODUCTS = 1 << 23


def can_pack(weight: Tensor) -> bool:
    """Whether the kernels can multiply by this weight."""
    is_plain = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_plain and load_kernels() is not None


#: Types of stored numbers, smallest first, and their numbers in `kernels.h`.
_DTYPE_CODES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 0}
#: Numbers that are checked at a time for whether they fit into 16 bits.
_CHECKED_NUMBERS = 1 << 22


def narrow_dtype(weight: Tensor) -> torch.dtype:
    """The smallest type of the kernels that holds a weight exactly."""
    kernels = load_kernels()
    assert kernels is not None, "callers must check can_pack first"
    for dtype, code in _DTYPE_CODES.items():
        if kernels.supports_dtype(code, 0) and _is_exact(weight, dtype):
            return dtype
    return weight.dtype


def _is_exact(weight: Tensor, dtype: torch.dtype) -> bool:
    rows = max(1, _CHECKED_NUMBERS // max(1, weight[:1].numel()))
    return all(torch.equal(part.to(dtype).to(part.dtype), part) for part in weight.split(rows))


class PackedWeight:
    """A weight of K inputs and N outputs in panels; the last panel is padded with zeros.

    Requires `can_pack`. The default dtype is the smallest that holds the weight exactly.
    """

    def __init__(self, weight_KN: Tensor, dtype: torch.dtype | None = None) -> None:
        kernels = load_kernels()
        assert kernels is not None, "callers must check can_pack first"
        self._kernels = kernels
        self.dtype = dtype or narrow_dtype(weight_KN)
        self.num_inputs, self.num_outputs = weight_KN.shape
        num_panels = -(-self.num_outputs // PANEL_WIDTH)
        self._panels = weight_KN.new_zeros(
            num_panels, self.num_inputs, PANEL_WIDTH, dtype=self.dtype
        )
        panels_PKC = self._panels_PKC
        num_full = self.num_outputs // PANEL_WIDTH
        full_KN, rest_KC = weight_KN.tensor_split([num_full * PANEL_WIDTH], dim=1)
        split_PKC = full_KN.unflatten(1, (num_full, PANEL_WIDTH)).transpose(0, 1)
        panels_PKC[:num_full] = split_PKC.view_as(panels_PKC[:num_full])
        if num_full < num_panels:
            padded_KC = torch.nn.functional.pad(rest_KC, (0, PANEL_WIDTH - rest_KC.shape[1]))
            panels_PKC[-1] = padded_KC.view_as(panels_PKC[-1])
        self.num_bytes = self._panels.nbytes
        self.struct = PackedWeightStruct(
            *(self.address, _DTYPE_CODES[self.dtype], self.num_inputs, self.num_outputs)
        )
        """Describes the weight to the kernels; valid while this object lives."""
        self._struct_address = ctypes.addressof(self.struct)

    @property
    def address(self) -> int:
        """Address of the panels."""
        return self._panels.data_ptr()

    @property
    def _panels_PKC(self) -> Tensor:
        """The panels with their columns in order; the last dimension may be split in two."""
        if self.dtype != torch.bfloat16:
            return self._panels
        # Columns j and j + LANES are stored as a pair.
        pairs: Tensor = self._panels.unflatten(-1, (LANES, 2))
        return pairs.transpose(-1, -2)

    def weight_KN(self) -> Tensor:
        """Return the unpacked weight as float32 in a new tensor."""
        panels_PKC: Tensor = self._panels_PKC.reshape(self._panels.shape)
        return panels_PKC.transpose(0, 1).flatten(1)[:, : self.num_outputs].float()

    def matmul(
        self, x_MK: Tensor, bias_N: Tensor | None = None, out_MN: Tensor | None = None
    ) -> Tensor:
        """Return x W + b, in `out_MN` or a new tensor."""
        x_MK = _contiguous_rows(x_MK, self.num_inputs)
        if out_MN is None:
            out_MN = x_MK.new_empty(x_MK.shape[0], self.num_outputs)
        else:
            _check_output(out_MN, x_MK.shape[0], self.num_outputs)
        self._kernels.packed_matmul(
            *(x_MK.data_ptr(), x_MK.stride(0), self._struct_address),
            *(0 if bias_N is None else bias_N.data_ptr(), 0),
            *(out_MN.data_ptr(), out_MN.stride(0), x_MK.shape[0]),
            torch.get_num_threads(),
        )
        return out_MN

    def matmul_transposed(self, y_MN: Tensor) -> Tensor:
        """Return y W^T in a new tensor; sums in the order of the transposed weight's `matmul`."""
        y_MN = _contiguous_rows(y_MN, self.num_outputs)
        out_MK = y_MN.new_empty(y_MN.shape[0], self.num_inputs)
        self._kernels.packed_matmul_transposed(
            *(y_MN.data_ptr(), y_MN.stride(0), self._struct_address),
            *(out_MK.data_ptr(), out_MK.stride(0), y_MN.shape[0]),
            torch.get_num_threads(),
        )
        return out_MK

    def columns(self, indices_M: Tensor) -> Tensor:
        """Return columns of the weight as rows (M, K), as an embedding that is tied to it does."""
        indices_M = indices_M.to(torch.int64).contiguous()
        out_MK = self._panels.new_empty(len(indices_M), self.num_inputs, dtype=torch.float32)
        if not self._kernels.packed_columns(
            *(self._struct_address, indices_M.data_ptr(), len(indices_M), out_MK.data_ptr()),
            torch.get_num_threads(),
        ):
            raise IndexError(f"a token is outside the vocabulary of {self.num_outputs}")
        return out_MK


class PackedLoraPair:
    """Packed LoRA matrices of linear layers that share an input, for decode steps.

    Requires `can_pack`.
    """

    def __init__(self, down_RK: Tensor, ups: Sequence[Tensor], scale: float) -> None:
        kernels = load_kernels()
        assert kernels is not None, "callers must check can_pack first"
        self._add_low_rank = kernels.add_low_rank
        self._down = PackedWeight(down_RK.t(), torch.float32)
        self._ups = [PackedWeight(up.t() * scale, torch.float32) for up in ups]
        num = len(self._ups)
        self._addresses = (ctypes.c_void_p * num)(*(up.address for up in self._ups))
        self._sizes = (ctypes.c_long * num)(*(up.num_outputs for up in self._ups))
        self._num_outputs = sum(up.num_outputs for up in self._ups)
        self.num_bytes = sum(weight.num_bytes for weight in (self._down, *self._ups))

    def to_struct(self) -> LoraPairStruct:
        """Describe the pair to the fused decode kernel; valid while this object lives."""
        ups, sizes = ctypes.addressof(self._addresses), ctypes.addressof(self._sizes)
        return LoraPairStruct(
            self._down.address, ups, sizes, self._ups[0].num_inputs, len(self._ups)
        )

    def add(self, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add the low-rank update of all layers to their merged output y."""
        x_MK = _contiguous_rows(x_MK, self._down.num_inputs)
        _check_output(y_MN, x_MK.shape[0], self._num_outputs)
        is_done = self._add_low_rank(
            *(x_MK.data_ptr(), x_MK.stride(0), self._down.address),
            *(self._ups[0].num_inputs, len(self._ups), self._addresses, self._sizes),
            *(y_MN.data_ptr(), y_MN.stride(0), x_MK.shape[0], self._down.num_inputs),
            torch.get_num_threads(),
        )
        if not is_done:
            raise MemoryError("out of memory for the LoRA update of a forward pass")


def _contiguous_rows(x_MK: Tensor, num_inputs: int) -> Tensor:
    """Check shape and dtype, which the kernels do not, and make each row contiguous."""
    if x_MK.shape[1] != num_inputs or x_MK.dtype != torch.float32:
        raise RuntimeError(
            f"rows of {x_MK.shape[1]} {x_MK.dtype}, expected {num_inputs} of torch.float32"
        )
    return x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()


def _check_output(y_MN: Tensor, num_rows: int, num_outputs: int) -> None:
    fits = y_MN.shape == (num_rows, num_outputs) and y_MN.dtype == torch.float32
    if not fits or y_MN.stride(1) != 1:
        raise RuntimeError(
            f"{tuple(y_MN.shape)} {y_MN.dtype} cannot hold {num_rows} rows of {num_outputs} numbers"
        )


# --- batches of small products --------------------------------------------------------------------


class _PendingMatmul(NamedTuple):
    out_MN: Tensor
    left_MK: Tensor
    right_KN: Tensor
    scale: float
    accumulate: bool


class MatmulBatch:
    """Matrix products that run together; the result of each is independent of the others."""

    def __init__(self) -> None:
        self._pending: list[_PendingMatmul] = []

    def write(self, out_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
        """Queue out = left @ right."""
        self._pending.append(_PendingMatmul(out_MN, left_MK, right_KN, 1.0, accumulate=False))

    def add(self, out_MN: Tensor, left_MK: Tensor, right_KN: Tensor, scale: float) -> None:
        """Queue out += scale * left @ right; `out_MN` may have a lower precision."""
        self._pending.append(_PendingMatmul(out_MN, left_MK, right_KN, scale, accumulate=True))

    def run(self) -> None:
        """Run all queued products: small ones by the kernel, the others by torch."""
        kernels = load_kernels()
        tasks = []
        for product in self._pending:
            if kernels is not None and _can_use_kernel(product):
                tasks.append(_gemm_task(product))
            elif product.accumulate:
                add_matmul(product.out_MN, product.left_MK, product.right_KN, product.scale)
            else:
                torch.mm(product.left_MK, product.right_KN, out=product.out_MN)
        if kernels is not None and tasks:
            array = (GemmTask * len(tasks))(*tasks)
            kernels.run_gemm_tasks(array, len(tasks), torch.get_num_threads())
        self._pending.clear()


def add_matmul(out_MN: Tensor, left_MK: Tensor, right_KN: Tensor, scale: float) -> None:
    """out += scale * left @ right, where `out_MN` may have a lower precision."""
    if left_MK.dtype == out_MN.dtype:
        out_MN.addmm_(left_MK, right_KN, alpha=scale)
    else:
        out_MN.add_(left_MK @ right_KN, alpha=scale)


def _can_use_kernel(product: _PendingMatmul) -> bool:
    out_MN, left_MK, right_KN, _, _ = product
    return (
        left_MK.numel() * right_KN.shape[1] <= _MAX_KERNEL_PRODUCTS
        and out_MN.dtype == left_MK.dtype == right_KN.dtype == torch.float32
        and out_MN.stride(1) == 1
        and out_MN.device.type == "cpu"
    )


def _gemm_task(product: _PendingMatmul) -> GemmTask:
    out_MN, left_MK, right_KN, scale, accumulate = product
    return GemmTask(
        *(left_MK.data_ptr(), *left_MK.stride()),
        *(right_KN.data_ptr(), *right_KN.stride()),
        *(out_MN.data_ptr(), out_MN.stride(0)),
        *(*left_MK.shape, right_KN.shape[1]),
        *(scale, accumulate),
    )
