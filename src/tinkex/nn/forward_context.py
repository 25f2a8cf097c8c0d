"""Context of the running forward pass: the LoRA adapters of its rows, and its attention backend.

transformers calls the modules of a hosted model without either, so the modules read them from here.
One pass runs at a time, in whichever threads autograd uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tinkex.nn.lora_layout import LoraPair

#: What the backward of LoRA needs: x down^T of each adapter, None where it has no update.
SavedLora: TypeAlias = Sequence[Tensor | None]


class BoundAdapter(NamedTuple):
    """An adapter as applied to rows of a forward pass."""

    scale: float
    """Factor of the low-rank update."""
    weights: Sequence[LoraPair | None]
    """The adapter's A and B matrices by target index; None where it has none."""
    gradient: Sequence[LoraPair | None] | None = None
    """Buffers that accumulate its gradient; None if it is not trained."""


class LoraRows(Protocol):
    """Applies adapters to the rows of a forward pass."""

    def is_trained(self, target_index: int) -> bool:
        """Whether any row's adapter needs a gradient at this target."""
        ...

    def add(self, target_index: int, x_MK: Tensor, y_MN: Tensor) -> SavedLora:
        """Add the low-rank update to `y_MN` in place; returns what `backward` needs."""
        ...

    def backward(
        self, target_index: int, x_MK: Tensor, dy_MN: Tensor, saved: SavedLora, dx_MK: Tensor | None
    ) -> None:
        """Accumulate the adapters' gradients and add the low-rank update to `dx_MK` in place."""
        ...

    def adapters_by_row(
        self, num_rows: int
    ) -> tuple[npt.NDArray[np.int64], Sequence[BoundAdapter]]:
        """Return the index of each row's adapter in the returned list, -1 for none."""
        ...


class AttentionOptions(NamedTuple):
    """Attention parameters of a layer."""

    scaling: float
    window: int | None = None
    """Number of last positions that are visible (sliding window); None for all."""
    softcap: float | None = None


class AttentionBackend(Protocol):
    """Computes attention between the rows of a forward pass."""

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention of T rows with H query and G key heads; returns (T, H, D)."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """LoRA adapters and attention backend of a forward pass."""

    lora: LoraRows
    attention: AttentionBackend


@dataclass(slots=True)
class ActiveForward:
    """A running forward pass, and values that its modules share until it ends."""

    context: ForwardContext
    checkpoint_activations: bool
    saved: dict[object, object]


_active_forwards: list[ActiveForward] = []


@contextmanager
def activate(context: ForwardContext, *, checkpoint_activations: bool = False) -> Iterator[None]:
    """Make a context visible to the model's modules until the block ends."""
    _active_forwards.append(ActiveForward(context, checkpoint_activations, {}))
    try:
        yield
    finally:
        _active_forwards.pop()


def active_forward() -> ActiveForward:
    """Return the running forward pass."""
    assert _active_forwards, "a hosted model runs only inside `activate`"
    return _active_forwards[-1]


def active_context() -> ForwardContext:
    """Return the context of the running forward pass."""
    return active_forward().context
