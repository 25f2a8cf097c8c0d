"""MoE experts with LoRA: each row is routing to a few experts, and each expert has its own A and B.

transformers stores all experts of a layer in one parameter. (row, expert) pairs are sorted by
expert, then by adapter, so that every product has consecutive rows.

Shape letters: M rows, S (row, expert) pairs, C experts per row, E experts, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tinkex.errors import ConfigError
from tinkex.nn.forward_context import LoraRows, SavedLora, active_context
from tinkex.nn.lora_layout import LoraTarget, TargetKind
from tinkex.nn.lora_training import LoraSegment, SegmentedLora
from tinkex.nn.ops.autograd import FunctionContext

#: Expert parameters that are adapted.
_PARAMETER_NAMES = ("gate_up_proj", "down_proj")
TARGETS_PER_EXPERTS = len(_PARAMETER_NAMES)
"""Number of LoRA targets of an experts module."""


class Routing(NamedTuple):
    """Order of the (row, expert) pairs of a pass after sorting."""

    rows_S: Tensor
    """Row of each pair."""
    order_S: Tensor
    """Index of each pair before sorting."""
    stops_E: list[int]
    """End of each expert's pairs."""
    lora: SegmentedLora
    """Adapters of the pairs."""


def route_tokens(chosen_MC: Tensor, num_experts: int, lora: LoraRows) -> Routing:
    """Sort the (row, expert) pairs by expert, then by adapter."""
    chosen = chosen_MC.detach().cpu().numpy()
    adapter_M, adapters = lora.adapters_by_row(len(chosen))
    # Keys are expert * groups + adapter + 1; group 0 has no adapter.
    groups = len(adapters) + 1
    key_S = (chosen * groups + adapter_M[:, None] + 1).reshape(-1)
    order_S = np.argsort(key_S, kind="stable")
    edges = np.searchsorted(key_S[order_S], np.arange(num_experts * groups + 1)).tolist()
    segments = [
        LoraSegment(start, stop, *adapters[key % groups - 1], expert=key // groups)
        for key, (start, stop) in enumerate(pairwise(edges))
        if stop > start and key % groups
    ]
    order = torch.from_numpy(order_S).to(chosen_MC.device)
    return Routing(
        order // chosen_MC.shape[1], order, edges[groups::groups], SegmentedLora(segments)
    )


class ExpertWeights(nn.Module):
    """One frozen parameter of all experts, with LoRA."""

    def __init__(self, target_index: int, weight_EKN: Tensor, bias_EN: Tensor | None) -> None:
        super().__init__()
        self.target_index = target_index
        self._weight_EKN = nn.Parameter(weight_EKN, requires_grad=False)
        self._bias_EN = bias_EN
        self._anchor = torch.zeros((), requires_grad=True)

    def apply_experts(self, x_SK: Tensor, routing: Routing) -> Tensor:
        """Apply each pair's expert; differentiable."""
        if not torch.is_grad_enabled():
            return self.forward(x_SK, routing)[0]
        anchor = self._anchor if routing.lora.is_trained(self.target_index) else None
        y_SN: Tensor = _ExpertWeightsFunction.apply(  # type: ignore[no-untyped-call]
            x_SK, anchor, self, routing
        )
        return y_SN

    def forward(self, x_SK: Tensor, routing: Routing) -> tuple[Tensor, SavedLora]:
        """Return the outputs and what `backward` needs for LoRA."""
        y_SN = x_SK.new_empty(x_SK.shape[0], self._weight_EKN.shape[-1])
        for expert, rows in _expert_slices(routing.stops_E):
            torch.mm(x_SK[rows], self._weight_EKN[expert], out=y_SN[rows])
            if self._bias_EN is not None:
                y_SN[rows] += self._bias_EN[expert]
        return y_SN, routing.lora.add(self.target_index, x_SK, y_SN)

    def backward(
        self,
        x_SK: Tensor,
        dy_SN: Tensor,
        saved: SavedLora,
        routing: Routing,
        *,
        needs_input_grad: bool,
    ) -> Tensor | None:
        """Accumulate the adapters' gradients; returns the input's gradient if needed."""
        dx_SK = self._backward_input(dy_SN, routing) if needs_input_grad else None
        routing.lora.backward(self.target_index, x_SK, dy_SN, saved, dx_SK)
        return dx_SK

    def _backward_input(self, dy_SN: Tensor, routing: Routing) -> Tensor:
        dx_SK = dy_SN.new_empty(dy_SN.shape[0], self._weight_EKN.shape[1])
        for expert, rows in _expert_slices(routing.stops_E):
            torch.mm(dy_SN[rows], self._weight_EKN[expert].t(), out=dx_SK[rows])
        return dx_SK


def _expert_slices(stops_E: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have pairs, with the slice of their pairs."""
    start = 0
    for expert, stop in enumerate(stops_E):
        if stop > start:
            yield expert, slice(start, stop)
        start = stop


class _ExpertWeightsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[ExpertWeights, Routing]],
        x_SK: Tensor,
        anchor: Tensor | None,
        experts: ExpertWeights,
        routing: Routing,
    ) -> Tensor:
        y_SN, saved = experts.forward(x_SK, routing)
        ctx.save_for_backward(x_SK, *saved)
        ctx.state = experts, routing
        return y_SN

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[ExpertWeights, Routing]], dy_SN: Tensor
    ) -> tuple[Tensor | None, None, None, None]:
        experts, routing = ctx.state
        x_SK, *saved = ctx.saved_tensors
        needs_dx = ctx.needs_input_grad[0]
        dx_SK = experts.backward(x_SK, dy_SN, saved, routing, needs_input_grad=needs_dx)
        return dx_SK, None, None, None


class LoraExperts(nn.Module):
    """Replacement for an experts module."""

    def __init__(self, first_target_index: int, original: nn.Module) -> None:
        super().__init__()
        self._gate_up, self._down = (
            _take_expert_weights(first_target_index + index, original, name)
            for index, name in enumerate(_PARAMETER_NAMES)
        )
        self._apply_gate: Callable[[Tensor], Tensor] = original._apply_gate  # type: ignore[assignment]
        self._num_experts = int(original.num_experts)  # type: ignore[arg-type]

    def forward(self, x_MK: Tensor, chosen_MC: Tensor, weights_MC: Tensor) -> Tensor:
        """Return the sum of the chosen experts' outputs, weighted by the router."""
        routing = route_tokens(chosen_MC, self._num_experts, active_context().lora)
        h_SI = self._apply_gate(
            self._gate_up.apply_experts(x_MK.index_select(0, routing.rows_S), routing)
        )
        weights_S = weights_MC.reshape(-1).index_select(0, routing.order_S)
        y_SK = self._down.apply_experts(h_SI, routing) * weights_S.unsqueeze(1)
        # Back to the order of rows.
        inverse_S = torch.empty_like(routing.order_S)
        inverse_S[routing.order_S] = torch.arange(len(inverse_S), device=inverse_S.device)
        y_MCK = y_SK.index_select(0, inverse_S).view(*chosen_MC.shape, -1)
        return y_MCK.sum(1).to(x_MK.dtype)


def is_experts_module(module: nn.Module) -> bool:
    """Whether a module stores experts in one three-dimensional parameter."""
    return any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))


def expert_targets(path: str, original: nn.Module) -> list[LoraTarget]:
    """Return the LoRA targets of an experts module; raises ConfigError if it is unsupported."""
    is_known = (
        {name.removesuffix("_bias") for name, _ in original.named_parameters()}
        == set(_PARAMETER_NAMES)
        and getattr(original, "has_gate", False)
        and not original.has_post_expert_norm
    )
    if not is_known:
        raise ConfigError(
            f"{path} cannot be adapted: {type(original).__name__} is not a supported experts module"
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


def _weight_EKN(original: nn.Module, name: str) -> Tensor:
    weight: Tensor = getattr(original, name).detach()
    return weight if original.is_transposed else weight.transpose(1, 2)


def _take_expert_weights(target_index: int, original: nn.Module, name: str) -> ExpertWeights:
    weight_EKN = _weight_EKN(original, name).contiguous()
    bias_EN = getattr(original, f"{name}_bias").detach() if original.has_bias else None
    # Only the module's gate function is still used; free its copy of the weights.
    delattr(original, name)
    return ExpertWeights(target_index, weight_EKN, bias_EN)
