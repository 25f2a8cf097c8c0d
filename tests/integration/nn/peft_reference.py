"""A hosted model and the same model under PEFT as the reference, with the same adapter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.hosted_model import HostedModel
from tinkex.nn.lora_layout import LoraLayout, TargetKind
from tinkex.nn.lora_training import LoraSegment, SegmentedLora
from tinkex.nn.packed_attention import PackedAttention

RANK = 4
SCALE = 32 / RANK


@dataclass(frozen=True)
class ModelOutput:
    """Logits of some sequences, and the adapter's gradient by module."""

    logits: Tensor
    gradient: dict[str, tuple[Tensor, Tensor]]


class HostAndPeft:
    """One model hosted and under PEFT."""

    def __init__(
        self, model: PreTrainedModel, parts: Collection[TargetKind] = tuple(TargetKind)
    ) -> None:
        original = copy.deepcopy(model)
        self.host = HostedModel(model)
        self.layout = LoraLayout(self.host.lora_targets, RANK, parts)
        self.weights = trained_weights(self.layout)
        self.peft = _under_peft(original, self.layout)
        self._pairs = _lora_pairs(self.peft, self.layout)
        for path, down, up in self.layout.pairs(self.weights):
            for ours, theirs in zip((down, up), self._pairs[path], strict=True):
                theirs.data.copy_(_as_peft(ours))

    def run_host(
        self, sequences: Sequence[Tensor], dlogits: Tensor, **options: bool
    ) -> ModelOutput:
        """Run the hosted model on packed sequences."""
        gradient = torch.zeros_like(self.weights)
        views = self.layout.views
        num_rows = sum(map(len, sequences))
        lora = SegmentedLora(
            [LoraSegment(0, num_rows, SCALE, views(self.weights), views(gradient))],
        )
        logits = run(self.host, lora, sequences, dlogits, **options)
        pairs = self.layout.pairs(gradient)
        return ModelOutput(logits, {path: (down, up) for path, down, up in pairs})

    def run_peft(self, sequences: Sequence[Tensor], dlogits: Tensor) -> ModelOutput:
        """Run PEFT on one sequence after the other, with autograd."""
        self.peft.zero_grad()
        logits = torch.cat(
            [self.peft(input_ids=one.unsqueeze(0), use_cache=False).logits[0] for one in sequences]
        )
        (logits * dlogits).sum().backward()
        num_experts = {
            path: target.num_experts for target in self.host.lora_targets for path in target.paths
        }
        return ModelOutput(
            logits.detach(),
            {
                path: (
                    _as_ours(down.grad, num_experts[path], is_up=False),
                    _as_ours(up.grad, num_experts[path], is_up=True),
                )
                for path, (down, up) in self._pairs.items()
            },
        )


def run(
    host: HostedModel,
    lora: SegmentedLora,
    sequences: Sequence[Tensor],
    dlogits: Tensor,
    **options: bool,
) -> Tensor:
    """Return the logits of packed sequences; accumulates the adapters' gradients."""
    context = ForwardContext(lora, PackedAttention([len(one) for one in sequences]))
    positions = torch.cat([torch.arange(len(one)) for one in sequences])
    hidden = host.hidden_states(torch.cat(list(sequences)), positions, context, **options)
    leaf = hidden.detach()
    logits, saved = host.lm_head.logits(leaf, lora)
    dhidden = host.lm_head.backward(leaf, dlogits.clone(), logits.clone(), saved, lora)
    if hidden.requires_grad:
        hidden.backward(dhidden)
    return logits


def trained_weights(layout: LoraLayout, seed: int = 3) -> Tensor:
    """Adapter weights with nonzero B."""
    flat = layout.init_weights(seed)
    rng = torch.Generator().manual_seed(seed)
    for pair in layout.views(flat):
        for up in pair.ups if pair else ():
            up.normal_(0, 0.05, generator=rng)
    return flat


def _under_peft(model: PreTrainedModel, layout: LoraLayout) -> nn.Module:
    pairs = list(layout.pairs(layout.init_weights(0)))
    config = LoraConfig(
        r=RANK,
        lora_alpha=32,
        target_modules=[pair.path for pair in pairs if pair.down.ndim == 2],
        target_parameters=[pair.path for pair in pairs if pair.down.ndim == 3] or None,
    )
    with warnings.catch_warnings():
        # PEFT warns about tied heads and transposed layers, but handles them.
        warnings.simplefilter("ignore")
        return get_peft_model(model, config)


def _lora_pairs(
    peft: nn.Module, layout: LoraLayout
) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    modules = dict(peft.named_modules())
    pairs = {}
    for path, down, _ in layout.pairs(layout.init_weights(0)):
        layer = modules[f"base_model.model.{path if down.ndim == 2 else path.rpartition('.')[0]}"]
        while down.ndim == 3 and layer.parameter_name != path.rpartition(".")[2]:
            layer = layer.base_layer
        pairs[path] = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return pairs


def _as_peft(ours: Tensor) -> Tensor:
    """PEFT stores the experts of a layer as one matrix: (E R, K) and (N, R E)."""
    if ours.ndim == 2:
        return ours
    if ours.shape[-1] != RANK:
        return ours.flatten(0, 1)
    return ours.permute(1, 2, 0).flatten(1)


def _as_ours(theirs: Tensor, num_experts: int, *, is_up: bool) -> Tensor:
    if not num_experts:
        return theirs
    if not is_up:
        return theirs.unflatten(0, (num_experts, RANK))
    return theirs.unflatten(1, (RANK, num_experts)).permute(2, 0, 1)
