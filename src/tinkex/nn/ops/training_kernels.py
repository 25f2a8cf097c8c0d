"""The kernels of `training_kernels.c`, called with tensors; check `can_use_training_kernels` first.

Shape letters: R rows, W numbers that are normed together, T tokens, H query heads, G key heads,
K head width, F width of the MLP, P positions, V vocabulary.
"""

from __future__ import annotations

import ctypes
from functools import cache
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.nn.ops.library import LANES, SOURCE_DIR, compile_library

_NUM_PARTIALS = 16
_MAX_HEAD_DIM = 512
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


@cache
def load_training_kernels() -> ctypes.CDLL | None:
    """The kernels of training, compiled once in a process; None if this machine cannot."""
    found = compile_library(
        [SOURCE_DIR / name for name in ("training_kernels.c", "attention_varlen.c")]
    )
    if found is None:
        return None
    seen = [*(_POINTER, _LONG) * 3, _POINTER, *(_LONG,) * 4, _FLOAT]
    turned = [*(_POINTER,) * 3, _FLOAT, *(_POINTER,) * 2, *(_LONG,) * 4]
    arguments = {
        "add_rms_norm_forward": [*(_POINTER,) * 3, _FLOAT, _LONG, _LONG, _POINTER, _POINTER],
        "add_rms_norm_backward": [*(_POINTER,) * 4, _FLOAT, _LONG, _LONG, _POINTER, _POINTER],
        "rotary_forward": [*turned, _POINTER, _POINTER],
        "rotary_backward": [*turned, *(_POINTER,) * 5],
        "swiglu_forward": [_POINTER, _LONG, _LONG, _POINTER],
        "swiglu_backward": [_POINTER, _POINTER, _LONG, _LONG, _POINTER],
        "varlen_attention_forward": [*seen, *(_POINTER,) * 3, _LONG],
        "varlen_attention_backward": [*seen, *(_POINTER,) * 7, _LONG],
        "cross_entropy_forward_backward": [_POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER],
    }
    for name, kinds in arguments.items():
        function = getattr(found, name)
        function.restype, function.argtypes = None, [*kinds, _INT]
    found.varlen_attention_scratch.restype = _LONG
    found.varlen_attention_scratch.argtypes = [_LONG, _LONG]
    return found


def call_kernel(name: str, *arguments: object) -> None:
    """Run a kernel on tensors and numbers, with as many threads as torch has."""
    plain = (one.data_ptr() if isinstance(one, Tensor) else one for one in arguments)
    getattr(load_training_kernels(), name)(*plain, torch.get_num_threads())


def can_use_training_kernels(*tensors: Tensor) -> bool:
    """Whether the kernels read these: numbers of float32 in this machine's memory, in eights."""
    return (
        all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
        and all(x.shape[-1] % LANES == 0 and x.is_contiguous() for x in tensors)
        and load_training_kernels() is not None
    )


# --- norms ----------------------------------------------------------------------------------


def add_rms_norm_forward(
    x_RW: Tensor, delta_RW: Tensor | None, weight_W: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum of both, and its norm; without a delta the sum is the input itself."""
    width = x_RW.shape[-1]
    sum_RW = x_RW if delta_RW is None else torch.empty_like(x_RW)
    y_RW = torch.empty_like(x_RW)
    scale_W = weight_W * sqrt(width)
    call_kernel(
        *("add_rms_norm_forward", x_RW, delta_RW, scale_W, width * eps),
        *(x_RW.numel() // width, width, sum_RW, y_RW),
    )
    return sum_RW, y_RW


def add_rms_norm_backward(
    sum_RW: Tensor, weight_W: Tensor, eps: float, dsum_RW: Tensor | None, dy_RW: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the sum and of the weight."""
    width = sum_RW.shape[-1]
    dx_RW, dscales_PW = torch.empty_like(sum_RW), sum_RW.new_empty(_NUM_PARTIALS, width)
    call_kernel(
        *("add_rms_norm_backward", sum_RW, dy_RW, dsum_RW, weight_W * sqrt(width), width * eps),
        *(sum_RW.numel() // width, width, dx_RW, dscales_PW),
    )
    return dx_RW, dscales_PW.sum(0).mul_(sqrt(width))


# --- turning --------------------------------------------------------------------------------


class QKRotary(NamedTuple):
    """How queries and keys are normed and turned."""

    num_query_heads: int
    num_kv_heads: int
    eps: float
    cos_T1h: Tensor
    """Of half a head."""
    sin_T1h: Tensor
    q_weight_K: Tensor | None
    k_weight_K: Tensor | None

    def can_use_kernel(self, all_TNK: Tensor) -> bool:
        """Whether the kernels can do it."""
        angles = (self.cos_T1h, self.sin_T1h)
        return all_TNK.shape[-1] <= _MAX_HEAD_DIM and can_use_training_kernels(all_TNK, *angles)

    def kernel_args(self, all_TNK: Tensor) -> tuple[object, ...]:
        """What both kernels begin with; scales live as long as what is returned."""
        width = all_TNK.shape[-1]
        weights = (self.q_weight_K, self.k_weight_K)
        scales = (None if one is None else one * sqrt(width) for one in weights)
        return (
            *(all_TNK, *scales, width * self.eps, self.cos_T1h, self.sin_T1h),
            *(len(all_TNK), self.num_query_heads, self.num_kv_heads, width),
        )


def rotary_forward(all_TNK: Tensor, rotary: QKRotary) -> tuple[Tensor, Tensor]:
    """Queries and keys, normed and turned."""
    width = all_TNK.shape[-1]
    q_THK = all_TNK.new_empty(len(all_TNK), rotary.num_query_heads, width)
    k_TGK = all_TNK.new_empty(len(all_TNK), rotary.num_kv_heads, width)
    told = rotary.kernel_args(all_TNK)
    call_kernel("rotary_forward", *told, q_THK, k_TGK)
    return q_THK, k_TGK


def rotary_backward(
    all_TNK: Tensor, rotary: QKRotary, dq_THK: Tensor, dk_TGK: Tensor, dv_TGK: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows, and (2, K) of the norms' weights."""
    width = all_TNK.shape[-1]
    dall_TNK, dscales_P2K = torch.empty_like(all_TNK), all_TNK.new_empty(_NUM_PARTIALS, 2, width)
    pulls = [one.contiguous() for one in (dq_THK, dk_TGK, dv_TGK)]
    told = rotary.kernel_args(all_TNK)
    call_kernel("rotary_backward", *told, *pulls, dall_TNK, dscales_P2K)
    return dall_TNK, dscales_P2K.sum(0).mul_(sqrt(width))


# --- gates and losses -----------------------------------------------------------------------


def swiglu_forward(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up."""
    width = gate_up_T2F.shape[-1] // 2
    y_TF = gate_up_T2F.new_empty(len(gate_up_T2F), width)
    call_kernel("swiglu_forward", gate_up_T2F, len(gate_up_T2F), width, y_TF)
    return y_TF


def swiglu_backward(gate_up_T2F: Tensor, dy_TF: Tensor) -> Tensor:
    """The gradient of gate and up."""
    dboth_T2F = torch.empty_like(gate_up_T2F)
    call_kernel("swiglu_backward", gate_up_T2F, dy_TF, len(gate_up_T2F), dy_TF.shape[-1], dboth_T2F)
    return dboth_T2F


def cross_entropy_forward_backward(
    logits_PV: Tensor, targets_P: Tensor, weights_P: Tensor
) -> Tensor:
    """The loss of each position; the logits become the slopes of the weighted losses."""
    losses_P = torch.empty_like(weights_P)
    call_kernel(
        "cross_entropy_forward_backward",
        logits_PV,
        targets_P,
        weights_P,
        *logits_PV.shape,
        losses_P,
    )
    return losses_P
