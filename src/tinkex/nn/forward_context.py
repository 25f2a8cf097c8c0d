"""What a running pass is about: whose rows are where, and which rows see each other.

The modules of a hosted model are called by transformers, which knows neither; they look here. One
pass runs at a time, whichever thread autograd uses for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tinkex.nn.lora_layout import LoraPair


class BoundAdapter(NamedTuple):
    """An adapter that works on rows of a pass."""

    scale: float
    """What the low-rank part is multiplied by: alpha / rank."""
    weights: Sequence[LoraPair | None]
    """The adapter's pairs by site."""
    gradient: Sequence[LoraPair | None] | None = None
    """Where its gradient is gathered; None if it is not trained."""


class LoraRows(Protocol):
    """Whose adapter works on which rows."""

    def is_trained(self, target_index: int) -> bool:
        """Whether any row's adapter wants a gradient at this site."""
        ...

    def add(self, target_index: int, x_MK: Tensor, y_MN: Tensor) -> Sequence[Tensor | None] | None:
        """Add the low-rank part to `y_MN` in place; returns what `pull` needs."""
        ...

    def backward(
        self, target_index: int, x_MK: Tensor, dy_MN: Tensor, saved: Any, dx_MK: Tensor | None
    ) -> None:
        """Gather the adapters' gradients, and add the low-rank part to `dx_MK` in place."""
        ...

    def adapters_by_row(
        self, num_rows: int
    ) -> tuple[npt.NDArray[np.int64], Sequence[BoundAdapter]]:
        """Each row's adapter by its index in the list, -1 for none; experts take rows apart."""
        ...


class AttentionOptions(NamedTuple):
    """How a layer attends."""

    scaling: float
    window: int | None = None
    """How many of the last positions are seen; None is all."""
    softcap: float | None = None


class AttentionBackend(Protocol):
    """Which rows see each other."""

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """The attention of T rows with H query and G key heads; returns (T, H, D)."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What the modules of a model need to know while it runs."""

    lora: LoraRows
    attention: AttentionBackend


@dataclass(slots=True)
class ActiveForward:
    """A pass that is running, and what its modules keep for each other until it ends."""

    context: ForwardContext
    checkpoint_activations: bool
    saved: dict[object, Any]


_active_forwards: list[ActiveForward] = []


@contextmanager
def activate(context: ForwardContext, *, checkpoint_activations: bool = False) -> Iterator[None]:
    """Let the modules know of a pass until the block ends."""
    _active_forwards.append(ActiveForward(context, checkpoint_activations, {}))
    try:
        yield
    finally:
        _active_forwards.pop()


def active_forward() -> ActiveForward:
    """The run that is going on."""
    assert _active_forwards, "a hosted model runs only inside `running`"
    return _active_forwards[-1]


def active_context() -> ForwardContext:
    """The pass that is running."""
    return active_forward().context
