"""Tables of experts: each row goes to a few of them, and each expert has its own low-rank pairs.

transformers keeps all experts of a layer in one parameter. Rows are sorted by expert, and those of
one expert by adapter, so that every product is of rows that lie together.

Shape letters: M rows, S pairs of a row and an expert, C choices of a row, E experts, K inputs,
N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tinkex.errors import ConfigError
from tinkex.nn.forward_context import LoraRows, active_context
from tinkex.nn.lora_layout import LoraTarget, TargetKind
from tinkex.nn.lora_training import LoraSegment, SegmentedLora

#: The parameters of a table: what the gate and the input become, and the way back.
_PARAMETER_NAMES = ("gate_up_proj", "down_proj")
TARGETS_PER_EXPERTS = len(_PARAMETER_NAMES)
"""How many sites a module of experts has."""


class Routing(NamedTuple):
    """Where the pairs of a pass lie once they are sorted."""

    rows_S: Tensor
    """Each pair's row."""
    order_S: Tensor
    """Each pair's place before sorting, row by row."""
    stops_E: list[int]
    """Where each expert's pairs end."""
    lora: SegmentedLora
    """Whose pairs they are, expert by expert."""


def route_tokens(chosen_MC: Tensor, num_experts: int, lora: LoraRows) -> Routing:
    """Sort the pairs of rows and chosen experts by expert, then by adapter."""
    chosen = chosen_MC.detach().cpu().numpy()
    owner_M, owners = lora.adapters_by_row(len(chosen))
    kinds = len(owners) + 1
    key_S = (chosen * kinds + owner_M[:, None] + 1).reshape(-1)
    order_S = np.argsort(key_S, kind="stable")
    edges = np.searchsorted(key_S[order_S], np.arange(num_experts * kinds + 1)).tolist()
    segments = [
        LoraSegment(start, stop, *owners[kind % kinds - 1], expert=kind // kinds)
        for kind, (start, stop) in enumerate(pairwise(edges))
        if stop > start and kind % kinds
    ]
    order = torch.from_numpy(order_S).to(chosen_MC.device)
    return Routing(order // chosen_MC.shape[1], order, edges[kinds::kinds], SegmentedLora(segments))


class ExpertWeights:
    """The frozen maps of all experts, with every pair's adapter beside them."""

    def __init__(self, target_index: int, weight_EKN: Tensor, bias_EN: Tensor | None) -> None:
        self.target_index = target_index
        self._weight_EKN = weight_EKN
        self._bias_EN = bias_EN
        self._anchor = torch.zeros((), requires_grad=True)

    def apply(self, x_SK: Tensor, routing: Routing) -> Tensor:
        """What each pair's expert makes of it."""
        if not torch.is_grad_enabled():
            return self.forward(x_SK, routing)[0]
        anchor = self._anchor if routing.lora.is_trained(self.target_index) else None
        y_SN: Tensor = _ExpertWeightsFunction.apply(  # type: ignore[no-untyped-call]
            x_SK, anchor, self, routing
        )
        return y_SN

    def forward(self, x_SK: Tensor, routing: Routing) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The outputs, and what `pull` needs of the low-rank part."""
        y_SN = x_SK.new_empty(x_SK.shape[0], self._weight_EKN.shape[-1])
        for expert, at in _expert_slices(routing.stops_E):
            torch.mm(x_SK[at], self._weight_EKN[expert], out=y_SN[at])
            if self._bias_EN is not None:
                y_SN[at] += self._bias_EN[expert]
        return y_SN, routing.lora.add(self.target_index, x_SK, y_SN)

    def backward(
        self, x_SK: Tensor, dy_SN: Tensor, saved: Any, routing: Routing, *, needs_input_grad: bool
    ) -> Tensor | None:
        """Gather the adapters' gradients; returns the input's if it is wanted."""
        dx_SK = self._backward_input(dy_SN, routing) if needs_input_grad else None
        routing.lora.backward(self.target_index, x_SK, dy_SN, saved, dx_SK)
        return dx_SK

    def _backward_input(self, dy_SN: Tensor, routing: Routing) -> Tensor:
        dx_SK = dy_SN.new_empty(dy_SN.shape[0], self._weight_EKN.shape[1])
        for expert, at in _expert_slices(routing.stops_E):
            torch.mm(dy_SN[at], self._weight_EKN[expert].t(), out=dx_SK[at])
        return dx_SK


def _expert_slices(stops_E: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The experts that were chosen, and where their pairs lie."""
    start = 0
    for expert, stop in enumerate(stops_E):
        if stop > start:
            yield expert, slice(start, stop)
        start = stop


class _ExpertWeightsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SK: Tensor, anchor: Tensor | None, table: ExpertWeights, routing: Routing
    ) -> Tensor:
        y_SN, kept = table.forward(x_SK, routing)
        ctx.save_for_backward(x_SK, *kept)
        ctx.table, ctx.routed = table, routing
        return y_SN

    @staticmethod
    def backward(ctx: Any, dy_SN: Tensor) -> tuple[Tensor | None, None, None, None]:
        x_SK, *kept = ctx.saved_tensors
        with_input = ctx.needs_input_grad[0]
        dx_SK = ctx.table.backward(x_SK, dy_SN, kept, ctx.routed, needs_input_grad=with_input)
        return dx_SK, None, None, None


class LoraExperts(nn.Module):
    """Stands where a module of experts stood."""

    def __init__(self, first_target_index: int, original: nn.Module) -> None:
        super().__init__()
        self._gate_up, self._down = (
            _take_expert_weights(first_target_index + index, original, name)
            for index, name in enumerate(_PARAMETER_NAMES)
        )
        self._apply_gate: Callable[[Tensor], Tensor] = original._apply_gate  # type: ignore[assignment]
        self._num_experts = int(original.num_experts)  # type: ignore[arg-type]

    def forward(self, x_MK: Tensor, chosen_MC: Tensor, weights_MC: Tensor) -> Tensor:
        """The experts' answers, each as much as the router trusts it."""
        routed = route_tokens(chosen_MC, self._num_experts, active_context().lora)
        h_SI = self._apply_gate(self._gate_up.apply(x_MK.index_select(0, routed.rows_S), routed))
        weights_S = weights_MC.reshape(-1).index_select(0, routed.order_S)
        y_SK = self._down.apply(h_SI, routed) * weights_S.unsqueeze(1)
        # Back to the order of rows, where the choices of each lie together.
        back_S = torch.empty_like(routed.order_S)
        back_S[routed.order_S] = torch.arange(len(back_S), device=back_S.device)
        y_MCK = y_SK.index_select(0, back_S).view(*chosen_MC.shape, -1)
        return y_MCK.sum(1).to(x_MK.dtype)


def is_experts_module(module: nn.Module) -> bool:
    """Whether a module holds experts in one parameter."""
    return any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))


def expert_targets(path: str, original: Any) -> list[LoraTarget]:
    """The sites of a module of experts; raises for one of an unknown kind."""
    is_known = (
        {name.removesuffix("_bias") for name, _ in original.named_parameters()}
        == set(_PARAMETER_NAMES)
        and getattr(original, "has_gate", False)
        and not original.has_post_expert_norm
    )
    if not is_known:
        raise ConfigError(
            f"{path} cannot be adapted: {type(original).__name__} is no table of gated experts"
        )
    shapes = {name: _weight_EKN(original, name).shape for name in _PARAMETER_NAMES}
    return [
        LoraTarget(
            kind=TargetKind.MLP,
            paths=(f"{path}.{name}",),
            in_features=size_in,
            out_features=(size_out,),
            num_experts=num_experts,
        )
        for name, (num_experts, size_in, size_out) in shapes.items()
    ]


def _weight_EKN(original: Any, name: str) -> Tensor:
    weight: Tensor = getattr(original, name).detach()
    return weight if original.is_transposed else weight.transpose(1, 2)


def _take_expert_weights(target_index: int, original: Any, name: str) -> ExpertWeights:
    weight_EKN = _weight_EKN(original, name).contiguous()
    bias_EN = getattr(original, f"{name}_bias").detach() if original.has_bias else None
    # What stays of the module is its gate; two copies of all experts would be too much.
    delattr(original, name)
    return ExpertWeights(target_index, weight_EKN, bias_EN)
