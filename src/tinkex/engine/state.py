"""Everything that decides what an adapter does next, as flat buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

#: What the low-rank part is multiplied by, times the rank.
ALPHA = 32


@dataclass(slots=True, kw_only=True)
class AdapterState:
    """An adapter's numbers; `Layout` says what lies where in the buffers, which are float32."""

    weights: Tensor
    first: Tensor
    """AdamW's mean of gradients."""
    second: Tensor
    """AdamW's mean of squared gradients."""
    num_steps: int = 0
    """How many optimizer steps were taken."""
    gradient: Tensor | None = None
    """What was gathered since the last step; None is nothing."""

    @classmethod
    def fresh(cls, weights: Tensor) -> Self:
        """A state that has never been trained."""
        return cls(
            weights=weights, first=torch.zeros_like(weights), second=torch.zeros_like(weights)
        )

    def copied(self) -> AdapterState:
        """The same numbers in memory of their own, where they can be written from."""
        return self._each(lambda buffer: torch.empty_like(buffer, device="cpu").copy_(buffer))

    def moved(self, device: torch.device) -> AdapterState:
        """The same numbers on a device."""
        return self._each(lambda buffer: buffer.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> AdapterState:
        return replace(
            self,
            weights=change(self.weights),
            first=change(self.first),
            second=change(self.second),
            gradient=None if self.gradient is None else change(self.gradient),
        )
