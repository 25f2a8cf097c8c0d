"""Everything that decides what an adapter does next, as flat buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

#: What the low-rank part is multiplied by, times the rank.
LORA_ALPHA = 32


@dataclass(slots=True, kw_only=True)
class AdapterState:
    """An adapter's numbers; `Layout` says what lies where in the buffers, which are float32."""

    weights: Tensor
    first: Tensor | None = None
    """AdamW's mean of gradients; None before the first step, which is all zeros."""
    second: Tensor | None = None
    """AdamW's mean of squared gradients; None before the first step, which is all zeros."""
    num_steps: int = 0
    """How many optimizer steps were taken."""
    gradient: Tensor | None = None
    """What was gathered since the last step; None is nothing."""

    @classmethod
    def from_weights(cls, weights: Tensor) -> Self:
        """A state that has never been trained."""
        return cls(weights=weights)

    def ensure_moments(self) -> tuple[Tensor, Tensor]:
        """AdamW's two buffers, allocated at the first call."""
        if self.first is None or self.second is None:
            self.first, self.second = (torch.zeros_like(self.weights) for _ in range(2))
        return self.first, self.second

    def buffers(self) -> dict[str, Tensor]:
        """The allocated buffers by name."""
        names = ("weights", "first", "second", "gradient")
        found = {name: getattr(self, name) for name in names}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def copy_to_cpu(self) -> AdapterState:
        """The same numbers in memory of their own, where they can be written from."""
        return self._map_buffers(
            lambda buffer: torch.empty_like(buffer, device="cpu").copy_(buffer)
        )

    def to(self, device: torch.device) -> AdapterState:
        """The same numbers on a device."""
        return self._map_buffers(lambda buffer: buffer.to(device))

    def _map_buffers(self, function: Callable[[Tensor], Tensor]) -> AdapterState:
        changed: dict[str, Any] = {
            name: function(buffer) for name, buffer in self.buffers().items()
        }
        return replace(self, **changed)
