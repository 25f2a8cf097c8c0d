"""Optimizers of the pipeline: AdamW with decay for matrices alone, and Muon for hidden matrices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from tinkex.errors import CheckpointError
from tinkex.pipeline.stage_interface import TrainPlan
from tinkex.pipeline.weights import clean_name, unwrap

_BETAS = (0.9, 0.95)
_EPS = 1e-8
#: The quintic that takes every singular value near to one in five steps.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7


def orthogonalize(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """The nearest matrix whose singular values are about one, by Newton-Schulz iteration.

    More than two dimensions are a stack of matrices.
    """
    a, b, c = _QUINTIC
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if is_tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(_SMALLEST_NORM)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = x.mT if is_tall else x
    return found


class Muon(Optimizer):
    """Momentum whose direction is made orthogonal; for matrices between hidden layers alone."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        num_steps: int = 5,
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "num_steps": num_steps,
        }
        super().__init__(list(params), settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step with the gradients that are there."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(param, group)

    def _step_one(self, param: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        gradient, momentum = param.grad, state["momentum"]
        assert gradient is not None
        momentum.lerp_(gradient, 1.0 - group["momentum"])
        ahead = gradient.lerp(momentum, group["momentum"])
        update = orthogonalize(ahead, group["num_steps"])
        scale = max(1.0, param.size(-2) / param.size(-1)) ** 0.5
        param.mul_(1.0 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"] * scale)


class CombinedOptimizer:
    """Several optimizers that step as one; each group keeps a peak learning rate of its own."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = dict(optimizers)
        self._peaks = [group["lr"] for group in self.param_groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts."""
        return [group for part in self._optimizers.values() for group in part.param_groups]

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter that is trained, in a fixed order."""
        return [param for group in self.param_groups for param in group["params"]]

    def set_lr_factor(self, factor: float) -> None:
        """Set every learning rate to a share of its peak."""
        for group, peak in zip(self.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor

    def step(self) -> None:
        """Take one step with all parts."""
        for part in self._optimizers.values():
            part.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for part in self._optimizers.values():
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """The state of each part under its name."""
        return {name: part.state_dict() for name, part in self._optimizers.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state; another optimizer's or other sizes are refused."""
        if "param_groups" in saved and len(self._optimizers) == 1:
            # Checkpoints of the older kind hold the state of one optimizer as torch gives it.
            saved = dict.fromkeys(self._optimizers, saved)
        if set(saved) != set(self._optimizers):
            raise CheckpointError(
                f"the checkpoint is of optimizer {'+'.join(sorted(saved))}, "
                f"this run has {'+'.join(sorted(self._optimizers))}",
                hint="Resume with the optimizer the checkpoint was made with.",
            )
        for name, part in self._optimizers.items():
            try:
                part.load_state_dict(dict(saved[name]))
            except (ValueError, KeyError) as error:
                raise CheckpointError(f"the state of {name} does not fit: {error}") from error
            _check_shapes(name, part)


def _check_shapes(name: str, part: Optimizer) -> None:
    for param, state in part.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
                raise CheckpointError(
                    f"{key} of {name} has shape {tuple(value.shape)}, "
                    f"its weight has {tuple(param.shape)}"
                )


def make_optimizer(model: nn.Module, plan: TrainPlan) -> CombinedOptimizer:
    """The optimizer of a plan over the trainable weights of a model."""
    model = unwrap(model)
    hidden, matrices, vectors = split_parameters(model)
    decayed = matrices if plan.optimizer == "muon" else [*matrices, *hidden]
    parts: dict[str, Optimizer] = {"adamw": _adamw(decayed, vectors, plan)}
    if plan.optimizer == "muon" and hidden:
        parts["muon"] = Muon(hidden, lr=plan.muon_lr, weight_decay=plan.weight_decay)
    return CombinedOptimizer(parts)


def _adamw(decayed: Sequence[Tensor], undecayed: Sequence[Tensor], plan: TrainPlan) -> AdamW:
    groups: list[dict[str, Any]] = [
        {"params": list(decayed), "weight_decay": plan.weight_decay},
        {"params": list(undecayed), "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=plan.learning_rate, betas=_BETAS, eps=_EPS, fused=True)


def split_parameters(model: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Trainable weights by their place: hidden matrices, tables and heads, and vectors."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    hidden: list[Tensor] = []
    outer: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if param.dim() < 2:
            vectors.append(param)
        elif id(param) in tables or "lm_head" in clean_name(name):
            outer.append(param)
        else:
            hidden.append(param)
    return hidden, outer, vectors
