"""Optimizers of the pipeline: AdamW with weight decay on matrices, and Muon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from tinkex.errors import CheckpointError
from tinkex.nn.muon import orthogonalize
from tinkex.pipeline.train_settings import TrainSettings
from tinkex.pipeline.weights import clean_name, unwrap

_BETAS = (0.9, 0.95)
_EPS = 1e-8


class Muon(Optimizer):
    """Muon: momentum with orthogonalized updates, for hidden matrices only."""

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
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
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
        nesterov = gradient.lerp(momentum, group["momentum"])
        update = orthogonalize(nesterov, group["num_steps"])
        scale = max(1.0, param.size(-2) / param.size(-1)) ** 0.5
        param.mul_(1.0 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"] * scale)


class CombinedOptimizer:
    """Several optimizers that step together; each group has its own peak learning rate."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = dict(optimizers)
        self._peaks = [group["lr"] for group in self.param_groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [
            group for optimizer in self._optimizers.values() for group in optimizer.param_groups
        ]

    @property
    def parameters(self) -> list[Tensor]:
        """All trained parameters in a fixed order."""
        return [param for group in self.param_groups for param in group["params"]]

    def set_lr_factor(self, factor: float) -> None:
        """Set every learning rate to its peak times `factor`."""
        for group, peak in zip(self.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor

    def step(self) -> None:
        """Step all optimizers."""
        for optimizer in self._optimizers.values():
            optimizer.step()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, object]:
        """Return the state of each optimizer by name."""
        return {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Load a saved state; raises CheckpointError if optimizers or shapes differ."""
        if "param_groups" in saved and len(self._optimizers) == 1:
            # Older checkpoints hold the state of a single optimizer without a name.
            saved = dict.fromkeys(self._optimizers, saved)
        if set(saved) != set(self._optimizers):
            raise CheckpointError(
                f"the checkpoint has the optimizer {'+'.join(sorted(saved))}, "
                f"this run has {'+'.join(sorted(self._optimizers))}",
                hint="Resume with the optimizer the checkpoint was made with.",
            )
        for name, optimizer in self._optimizers.items():
            state = saved[name]
            if not isinstance(state, Mapping):
                raise CheckpointError(f"the state of {name} is not a mapping")
            try:
                optimizer.load_state_dict(dict(state))
            except (ValueError, KeyError) as error:
                raise CheckpointError(f"the state of {name} does not fit: {error}") from error
            _check_shapes(name, optimizer)


def _check_shapes(name: str, optimizer: Optimizer) -> None:
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
                raise CheckpointError(
                    f"{key} of {name} has shape {tuple(value.shape)}, "
                    f"its weight has {tuple(param.shape)}"
                )


def make_optimizer(model: nn.Module, settings: TrainSettings) -> CombinedOptimizer:
    """Create the optimizer for the trainable weights of a model."""
    model = unwrap(model)
    hidden, matrices, vectors = split_parameters(model)
    decayed = matrices if settings.optimizer == "muon" else [*matrices, *hidden]
    parts: dict[str, Optimizer] = {"adamw": _adamw(decayed, vectors, settings)}
    if settings.optimizer == "muon" and hidden:
        parts["muon"] = Muon(hidden, lr=settings.muon_lr, weight_decay=settings.weight_decay)
    return CombinedOptimizer(parts)


def _adamw(
    decayed: Sequence[Tensor], undecayed: Sequence[Tensor], settings: TrainSettings
) -> AdamW:
    groups: list[dict[str, object]] = [
        {"params": list(decayed), "weight_decay": settings.weight_decay},
        {"params": list(undecayed), "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=settings.learning_rate, betas=_BETAS, eps=_EPS, fused=True)


def split_parameters(model: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Split trainable weights into hidden matrices, embeddings and heads, and vectors."""
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
