"""What the differentiable operations share: the context type, and calls of the C kernels."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tinkex.nn.ops.library import LANES, load_kernels

#: Partial sums of weight gradients that the kernels write (NUM_PARTIALS in `kernels.h`).
NUM_PARTIALS = 16

State = TypeVar("State")


class FunctionContext(Protocol[State]):
    """The `ctx` of an autograd function; `state` is what backward needs besides saved tensors."""

    state: State
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors, which activation checkpointing may drop and recompute."""
        ...

    def set_materialize_grads(self, value: bool) -> None:
        """Choose whether missing gradients of outputs are zeros (the default) or None."""
        ...


def can_use_kernels(*tensors: Tensor) -> bool:
    """Whether the kernels accept these: contiguous float32 on the CPU, widths in full lanes."""
    return (
        all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
        and all(x.shape[-1] % LANES == 0 and x.is_contiguous() for x in tensors)
        and load_kernels() is not None
    )


def call_kernel(name: str, *arguments: Tensor | float | None) -> None:
    """Run a kernel with torch's number of threads; tensors are passed as pointers."""
    pointers = (x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
    getattr(load_kernels(), name)(*pointers, torch.get_num_threads())
