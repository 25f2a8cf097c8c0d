"""A hosted model and the same model under PEFT, with the same adapter: who is right is PEFT."""

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
    """What a model made of some sequences, and the adapter's gradient by module."""

    logits: Tensor
    gradient: dict[str, tuple[Tensor, Tensor]]


class HostAndPeft:
    """One model twice."""

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

    def run_host(self, sequences: Sequence[Tensor], slopes: Tensor, **how: bool) -> ModelOutput:
        """Packed, with our gradient."""
        gradient = torch.zeros_like(self.weights)
        views = self.layout.views
        num_rows = sum(map(len, sequences))
        rows = SegmentedLora(
            [LoraSegment(0, num_rows, SCALE, views(self.weights), views(gradient))],
        )
        logits = run(self.host, rows, sequences, slopes, **how)
        pairs = self.layout.pairs(gradient)
        return ModelOutput(logits, {path: (down, up) for path, down, up in pairs})

    def run_peft(self, sequences: Sequence[Tensor], slopes: Tensor) -> ModelOutput:
        """One sequence after the other, with autograd's gradient."""
        self.peft.zero_grad()
        logits = torch.cat(
            [self.peft(input_ids=one.unsqueeze(0), use_cache=False).logits[0] for one in sequences]
        )
        (logits * slopes).sum().backward()
        num_experts = {
            path: site.num_experts for site in self.host.lora_targets for path in site.paths
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
    host: HostedModel, rows: SegmentedLora, sequences: Sequence[Tensor], slopes: Tensor, **how: bool
) -> Tensor:
    """The logits of packed sequences; gradients go where the rows say."""
    this = ForwardContext(rows, PackedAttention([len(one) for one in sequences]))
    positions = torch.cat([torch.arange(len(one)) for one in sequences])
    hidden = host.hidden_states(torch.cat(list(sequences)), positions, this, **how)
    leaf = hidden.detach()
    logits, kept = host.lm_head.logits(leaf, rows)
    pull = host.lm_head.backward(leaf, slopes.clone(), logits.clone(), kept, rows)
    if hidden.requires_grad:
        hidden.backward(pull)
    return logits


def trained_weights(layout: LoraLayout, seed: int = 3) -> Tensor:
    """Weights of an adapter that says something."""
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
        # It warns of tied heads and of transposed layers, which it then handles.
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
    """Tables of experts are one matrix there: (E R, K), and (N, R E)."""
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
