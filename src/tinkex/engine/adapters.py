"""Trainable adapters: specification checks, memory layout, weights and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from tinkex.engine.config import MAX_SHARDS, is_power_of_two
from tinkex.engine.protocol import AdapterSpec, matches_module
from tinkex.errors import InvalidInput
from tinkex.nn.lora_layout import LoraLayout, LoraPair, LoraTarget, TargetKind

if TYPE_CHECKING:
    from tinkex.nn.hosted_model import HostedModel

#: The moments that each optimizer keeps.
MOMENTS = {"adamw": ("first", "second"), "dimuon": ("first",)}


def optimizer_type(spec: AdapterSpec) -> str:
    """The optimizer's name, a key of `MOMENTS`."""
    return str(spec.optimizer.get("type"))


@dataclass(slots=True, kw_only=True)
class AdapterState:
    """The complete training state of an adapter, as flat float32 buffers (see `LoraLayout`)."""

    weights: Tensor
    first: Tensor | None = None
    """The first moment (Dimuon: the momentum); None means zeros, before the first step."""
    second: Tensor | None = None
    """AdamW's second moment; None means zeros, before the first step. Dimuon has none."""
    num_steps: int = 0
    """The number of optimizer steps taken."""
    gradient: Tensor | None = None
    """The gradient accumulated since the last step; None if there is none."""

    @classmethod
    def from_weights(cls, weights: Tensor) -> Self:
        """The state of an untrained adapter."""
        return cls(weights=weights)

    def ensure_moments(self, spec: AdapterSpec) -> list[Tensor]:
        """The moments of the adapter's optimizer, allocated on the first call."""
        names = MOMENTS[optimizer_type(spec)]
        if self.first is None:
            # All or none: a state with only some of them cannot be saved.
            new = [torch.zeros_like(self.weights) for _ in names]
            for name, buffer in zip(names, new, strict=True):
                setattr(self, name, buffer)
        return [getattr(self, name) for name in names]

    def buffers(self) -> dict[str, Tensor]:
        """The allocated buffers by name."""
        names = ("weights", "first", "second", "gradient")
        buffers = {name: getattr(self, name) for name in names}
        return {name: buffer for name, buffer in buffers.items() if buffer is not None}

    def copy_to_cpu(self) -> AdapterState:
        """A copy in CPU memory."""
        return self._map_buffers(
            lambda buffer: torch.empty_like(buffer, device="cpu").copy_(buffer)
        )

    def to(self, device: torch.device) -> AdapterState:
        """The same state on a device."""
        return self._map_buffers(lambda buffer: buffer.to(device))

    def _map_buffers(self, function: Callable[[Tensor], Tensor]) -> AdapterState:
        def apply(buffer: Tensor | None) -> Tensor | None:
            return None if buffer is None else function(buffer)

        return replace(
            self,
            weights=function(self.weights),
            first=apply(self.first),
            second=apply(self.second),
            gradient=apply(self.gradient),
        )


#: Adapters of a higher rank would be larger than the weights they adapt.
MAX_RANK = 1024


@dataclass(slots=True, eq=False)
class TrainableAdapter:
    """One adapter of a hosted model."""

    spec: AdapterSpec
    layout: LoraLayout
    state: AdapterState
    weight_views: Sequence[LoraPair | None] = field(init=False)
    """The LoRA pair of each target, as views of the weights."""

    def __post_init__(self) -> None:
        self.weight_views = self.layout.views(self.state.weights)

    @property
    def scale(self) -> float:
        """The scale of the low-rank update."""
        return self.spec.scale

    def replace_state(self, state: AdapterState) -> None:
        """Continue from another state."""
        self.state = state
        self.__post_init__()


def build_layout(hosted_model: HostedModel, spec: AdapterSpec) -> LoraLayout:
    """The buffer layout of such an adapter; raises InvalidInput for modules it does not have."""
    return layout_for(hosted_model.lora_targets, spec)


class _AdaptedModules(Protocol):
    """An `AdapterSpec`, or the `AdapterMetadata` of a checkpoint."""

    @property
    def rank(self) -> int: ...
    @property
    def target_modules(self) -> tuple[str, ...] | None: ...
    @property
    def train_attn(self) -> bool: ...
    @property
    def train_mlp(self) -> bool: ...
    @property
    def train_unembed(self) -> bool: ...


def layout_for(targets: Sequence[LoraTarget], source: _AdaptedModules) -> LoraLayout:
    """The buffer layout of an adapter of a model with these LoRA targets."""
    kinds = target_kinds(source)
    if source.target_modules is None:
        return LoraLayout(targets, source.rank, kinds)
    return LoraLayout(targets, source.rank, kinds, select_modules(targets, kinds, source))


def select_modules(
    targets: Sequence[LoraTarget], kinds: Collection[TargetKind], source: _AdaptedModules
) -> set[str]:
    """The paths of the modules that `target_modules` names; each name must select at least one."""
    paths = [path for target in targets if target.kind in kinds for path in target.paths]
    selected: set[str] = set()
    for name in source.target_modules or ():
        matching = {path for path in paths if matches_module(path, name)}
        if not matching:
            known = ", ".join(sorted({path.rpartition(".")[2] for path in paths}))
            raise InvalidInput(
                f"target module {name!r} is not in the trained parts of the model, whose modules "
                f"are: {known}"
            )
        selected |= matching
    return selected


def target_kinds(source: _AdaptedModules) -> set[TargetKind]:
    """The kinds of modules that an adapter has LoRA pairs for."""
    is_trained = {
        TargetKind.ATTENTION: source.train_attn,
        TargetKind.MLP: source.train_mlp,
        TargetKind.UNEMBED: source.train_unembed,
    }
    return {kind for kind in is_trained if is_trained[kind]}


def check_spec(spec: AdapterSpec) -> None:
    """Raise InvalidInput if the engine cannot create such an adapter."""
    if not 1 <= spec.rank <= MAX_RANK:
        raise InvalidInput(f"rank is {spec.rank}, expected 1 to {MAX_RANK}")
    if not (spec.train_unembed or spec.train_mlp or spec.train_attn):
        raise InvalidInput(
            "train_unembed, train_mlp and train_attn are all false: nothing to train"
        )
    if not (is_power_of_two(spec.gradient_shards) and spec.gradient_shards <= MAX_SHARDS):
        raise InvalidInput(
            f"gradient_shards is {spec.gradient_shards}, expected a power of two up to {MAX_SHARDS}"
        )
    if not (math.isfinite(spec.scale) and spec.alpha > 0.0):
        raise InvalidInput(f"alpha is {spec.alpha}, expected a number above 0")
    kind = optimizer_type(spec)
    if kind not in MOMENTS:
        raise InvalidInput(f"optimizer type {kind!r} is not one of {', '.join(MOMENTS)}")


def training_bytes(layout: LoraLayout, num_shards: int = 1) -> int:
    """Memory of weights, two moments, gradient and the gradients of a running pass, in float32.

    A running pass keeps the gradient of a shard, and of a subtree at each level of their tree.
    """
    return (5 + num_shards.bit_length() - 1) * 4 * layout.size


def create_adapter(hosted_model: HostedModel, spec: AdapterSpec) -> TrainableAdapter:
    """Create an adapter with a zero update: log-probabilities are the base model's."""
    layout = build_layout(hosted_model, spec)
    weights = layout.init_weights(spec.seed).to(hosted_model.device)
    return TrainableAdapter(spec, layout, AdapterState.from_weights(weights))
