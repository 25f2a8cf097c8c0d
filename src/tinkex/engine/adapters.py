"""Everything that decides what an adapter does next, as flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from tinkex.engine.protocol import AdapterSpec
from tinkex.errors import InvalidInput
from tinkex.nn.hosted_model import HostedModel
from tinkex.nn.lora_layout import LoraLayout, LoraPair, TargetKind

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


#: Adapters of a higher rank would be larger than what they adapt.
MAX_RANK = 1024


@dataclass(slots=True, eq=False)
class TrainableAdapter:
    """One adapter of a hosted model."""

    spec: AdapterSpec
    layout: LoraLayout
    state: AdapterState
    weight_views: Sequence[LoraPair | None] = field(init=False)
    """Its pairs by site, as views of its weights."""

    def __post_init__(self) -> None:
        self.weight_views = self.layout.views(self.state.weights)

    @property
    def scale(self) -> float:
        """What its low-rank part is multiplied by."""
        return LORA_ALPHA / self.spec.rank

    def replace_state(self, state: AdapterState) -> None:
        """Go on from other numbers."""
        self.state = state
        self.__post_init__()


def build_layout(hosted_model: HostedModel, spec: AdapterSpec) -> LoraLayout:
    """Where the pairs of such an adapter lie."""
    parts = {
        TargetKind.ATTENTION: spec.train_attn,
        TargetKind.MLP: spec.train_mlp,
        TargetKind.UNEMBED: spec.train_unembed,
    }
    return LoraLayout(
        hosted_model.lora_targets,
        spec.rank,
        [part for part, is_trained in parts.items() if is_trained],
    )


def check_spec(spec: AdapterSpec) -> None:
    """Refuse an adapter that cannot be made."""
    if not 1 <= spec.rank <= MAX_RANK:
        raise InvalidInput(f"rank is {spec.rank}, expected 1 to {MAX_RANK}")
    if not (spec.train_unembed or spec.train_mlp or spec.train_attn):
        raise InvalidInput(
            "train_unembed, train_mlp and train_attn are all false: nothing to train"
        )
    kind = spec.optimizer.get("type")
    if kind != "adamw":
        raise InvalidInput(f"optimizer type is {kind!r}; this server trains with 'adamw' alone")


def training_bytes(layout: LoraLayout) -> int:
    """Weights, two moments, the gradient, and the gradient of a pass in progress, in float32."""
    return 5 * 4 * layout.size


def create_adapter(hosted_model: HostedModel, spec: AdapterSpec) -> TrainableAdapter:
    """A new adapter that changes no log-probability yet."""
    layout = build_layout(hosted_model, spec)
    weights = layout.init_weights(spec.seed).to(hosted_model.device)
    return TrainableAdapter(spec, layout, AdapterState.from_weights(weights))
