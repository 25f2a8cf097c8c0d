"""Adapters in memory: what they are made like, and their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tinkex.engine.protocol import AdapterSpec
from tinkex.engine.state import LORA_ALPHA, AdapterState
from tinkex.errors import InvalidInput
from tinkex.nn.host import HostedModel
from tinkex.nn.sites import LoraLayout, LoraPair, TargetKind

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
