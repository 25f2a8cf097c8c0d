"""What is done to rows between products, by our own kernels, where nothing is differentiated.

Shape letters: M rows, K numbers of a row, N heads, D head width, I inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinkex.nn.ops.library import LANES, load_kernels


def can_use_kernels(*tensors: Tensor) -> bool:
    """Whether the kernels read these, whose last widths are what they take at a time."""
    return (
        all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
        and all(x.shape[-1] % LANES == 0 and x.is_contiguous() for x in tensors)
        and load_kernels() is not None
    )


def rms_norm_forward(x: Tensor, scale_K: Tensor, eps_sum: float) -> Tensor:
    """x / sqrt(|x|^2 + floor) * scale, in a new tensor."""
    found = load_kernels()
    assert found is not None
    y = torch.empty_like(x)
    width = x.shape[-1]
    found.rms_norm_forward(
        *(x.data_ptr(), scale_K.data_ptr(), eps_sum),
        *(x.numel() // width, width, y.data_ptr(), torch.get_num_threads()),
    )
    return y


def rotary_inplace(
    x_MND: Tensor,
    num_rotated: int,
    norm: tuple[Tensor, float] | None,
    angles: tuple[Tensor, Tensor],
) -> None:
    """Norm and turn the first heads in place; `angles` are cosines and sines of each row."""
    found = load_kernels()
    assert found is not None
    scale_ND, floor = norm or (None, 0.0)
    found.rotary_rows(
        *(x_MND.data_ptr(), x_MND.stride(0), x_MND.shape[0], num_rotated, x_MND.shape[2]),
        *(0 if scale_ND is None else scale_ND.data_ptr(), floor),
        *(angles[0].data_ptr(), angles[1].data_ptr(), torch.get_num_threads()),
    )


def swiglu_rows(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gates and ups behind each other, in a new tensor."""
    found = load_kernels()
    assert found is not None
    width = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], width)
    found.swiglu_rows(
        *(gate_up.data_ptr(), gate_up.numel() // (2 * width), width, y.data_ptr()),
        torch.get_num_threads(),
    )
    return y
