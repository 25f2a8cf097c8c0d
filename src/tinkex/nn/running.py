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

from tinkex.nn.sites import LowRank


class Owner(NamedTuple):
    """An adapter that works on rows of a pass."""

    scale: float
    """What the low-rank part is multiplied by: alpha / rank."""
    weights: Sequence[LowRank | None]
    """The adapter's pairs by site."""
    gradient: Sequence[LowRank | None] | None = None
    """Where its gradient is gathered; None if it is not trained."""


class LowRankRows(Protocol):
    """Whose adapter works on which rows."""

    def is_trained(self, site: int) -> bool:
        """Whether any row's adapter wants a gradient at this site."""
        ...

    def add(self, site: int, x_MK: Tensor, y_MN: Tensor) -> Sequence[Tensor | None] | None:
        """Add the low-rank part to `y_MN` in place; returns what `pull` needs."""
        ...

    def pull(self, site: int, x_MK: Tensor, dy_MN: Tensor, kept: Any, dx_MK: Tensor | None) -> None:
        """Gather the adapters' gradients, and add the low-rank part to `dx_MK` in place."""
        ...

    def owners(self, num_rows: int) -> tuple[npt.NDArray[np.int64], Sequence[Owner]]:
        """Each row's adapter by its index in the list, -1 for none; experts take rows apart."""
        ...


class Options(NamedTuple):
    """How a layer attends."""

    scaling: float
    window: int | None = None
    """How many of the last positions are seen; None is all."""
    softcap: float | None = None


class Attention(Protocol):
    """Which rows see each other."""

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, how: Options
    ) -> Tensor:
        """The attention of T rows with H query and G key heads; returns (T, H, D)."""
        ...


@dataclass(frozen=True, slots=True)
class Pass:
    """What the modules of a model need to know while it runs."""

    rows: LowRankRows
    attention: Attention


@dataclass(slots=True)
class Run:
    """A pass that is running, and what its modules keep for each other until it ends."""

    this: Pass
    save_memory: bool
    kept: dict[object, Any]


_running: list[Run] = []


@contextmanager
def running(this: Pass, *, save_memory: bool = False) -> Iterator[None]:
    """Let the modules know of a pass until the block ends."""
    _running.append(Run(this, save_memory, {}))
    try:
        yield
    finally:
        _running.pop()


def current_run() -> Run:
    """The run that is going on."""
    assert _running, "a hosted model runs only inside `running`"
    return _running[-1]


def current() -> Pass:
    """The pass that is running."""
    return current_run().this
