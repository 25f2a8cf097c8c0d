"""Gated activations of merged gate and up projections; SwiGLU has C kernels.

Shape letters: T token positions, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tinkex.nn.ops.autograd import FunctionContext, call_kernel, can_use_kernels
from tinkex.nn.ops.library import LANES

_aten = torch.ops.aten


class _ActivationBackward(Protocol):
    def __call__(self, dy: Tensor, x: Tensor, *, grad_input: Tensor) -> Tensor: ...


class GateActivation(NamedTuple):
    """An elementwise function and its backward, which writes to an existing tensor."""

    forward: Callable[[Tensor], Tensor]
    backward: _ActivationBackward


def _silu(x: Tensor) -> Tensor:
    return nn.functional.silu(x)


def _gelu(approximate: str) -> GateActivation:
    return GateActivation(
        partial(nn.functional.gelu, approximate=approximate),
        partial(_aten.gelu_backward.grad_input, approximate=approximate),
    )


SILU = GateActivation(_silu, _aten.silu_backward.grad_input)
ACTIVATIONS = (SILU, _gelu("tanh"), _gelu("none"))


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up, differentiable; runs the C kernels of training where they apply."""
    if not _can_use_kernel(gate_up_T2F):
        return gated_activation(gate_up_T2F, SILU)
    y_TF: Tensor = _SwiGLUFunction.apply(gate_up_T2F)  # type: ignore[no-untyped-call]
    return y_TF


def gated_activation(gate_up: Tensor, activation: GateActivation) -> Tensor:
    """activation(gate) * up in torch, differentiable."""
    y: Tensor = _GatedActivationFunction.apply(gate_up, activation)  # type: ignore[no-untyped-call]
    return y


def gated_activation_inference(gate_up: Tensor, activation: GateActivation) -> Tensor:
    """activation(gate) * up without gradients; SwiGLU runs the C kernel where it applies."""
    if activation is not SILU or not _can_use_kernel(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return activation.forward(gate).mul_(up)
    width = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], width)
    call_kernel("swiglu_rows", gate_up, gate_up.numel() // (2 * width), width, y)
    return y


def _can_use_kernel(gate_up: Tensor) -> bool:
    return gate_up.shape[-1] % (2 * LANES) == 0 and can_use_kernels(gate_up)


class _SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext[None], gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        num_rows, width = len(gate_up_T2F), gate_up_T2F.shape[-1] // 2
        y_TF = gate_up_T2F.new_empty(num_rows, width)
        call_kernel("swiglu_forward", gate_up_T2F, num_rows, width, y_TF)
        return y_TF

    @staticmethod
    def backward(ctx: FunctionContext[None], dy_TF: Tensor) -> Tensor:
        (gate_up_T2F,) = ctx.saved_tensors
        dgate_up_T2F, dy_TF = torch.empty_like(gate_up_T2F), dy_TF.contiguous()
        call_kernel("swiglu_backward", gate_up_T2F, dy_TF, *dy_TF.shape, dgate_up_T2F)
        return dgate_up_T2F


class _GatedActivationFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[GateActivation], gate_up: Tensor, activation: GateActivation
    ) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.state = activation
        gate, up = gate_up.chunk(2, dim=-1)
        return activation.forward(gate).mul_(up)

    @staticmethod
    def backward(ctx: FunctionContext[GateActivation], dy: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        # Both gradients are written in place; autograd would concatenate them afterwards.
        dgate_up = torch.empty_like(gate_up)
        dgate, dup = dgate_up.chunk(2, dim=-1)
        torch.mul(ctx.state.forward(gate), dy, out=dup)
        ctx.state.backward(dy * up, gate, grad_input=dgate)
        return dgate_up, None
