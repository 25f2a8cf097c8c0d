"""Model weights by name, without the prefixes of wrappers such as torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tinkex.errors import CheckpointError

#: Attributes in which torch.compile and data-parallel wrappers hold the model.
_WRAPPERS = ("module", "_orig_mod")
#: Maximum number of names of each kind in an error message.
_SHOWN = 5


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers."""
    for name in _WRAPPERS * 2:
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            model = inner
    return model


def clean_name(name: str) -> str:
    """Remove wrapper prefixes; compiled submodules insert theirs in the middle."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name.replace("_orig_mod.", "")


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict without wrapper prefixes; tied weights are the same tensor."""
    return {clean_name(name): value for name, value in unwrap(model).state_dict().items()}


@dataclass(frozen=True, slots=True)
class WeightDifference:
    """Differences between saved weights and a model."""

    missing: tuple[str, ...]
    """In the model, not in the file."""
    unexpected: tuple[str, ...]
    """In the file, not in the model."""
    mismatched_shapes: tuple[str, ...]
    """A description of each weight whose shape differs."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched_shapes)

    def __str__(self) -> str:
        parts = (
            _format_names("missing", self.missing),
            _format_names("not in the model", self.unexpected),
            _format_names("of another shape", self.mismatched_shapes),
        )
        return "; ".join(part for part in parts if part)


def compare_weights(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> WeightDifference:
    """Compare the weights of a model with saved ones."""
    both = [name for name in expected if name in found]
    return WeightDifference(
        missing=tuple(name for name in expected if name not in found),
        unexpected=tuple(name for name in found if name not in expected),
        mismatched_shapes=tuple(
            f"{name} {_shape(found[name])} instead of {_shape(expected[name])}"
            for name in both
            if found[name].shape != expected[name].shape
        ),
    )


@torch.no_grad()
def load_weights(
    model: nn.Module, weights: Mapping[str, Tensor], *, allow_partial: bool = False
) -> WeightDifference:
    """Copy saved weights into a model; raises CheckpointError if they do not fit."""
    own = named_weights(model)
    saved = {clean_name(name): value for name, value in weights.items()}
    difference = compare_weights(own, saved)
    if difference and not allow_partial:
        raise CheckpointError(
            f"the saved weights do not fit the model: {difference}",
            hint="Pass the sizes the checkpoint was made with, or allow a partial load.",
        )
    for name, target in own.items():
        if name in saved and saved[name].shape == target.shape:
            target.copy_(saved[name])
    return difference


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "scalar"


def _format_names(label: str, names: tuple[str, ...]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {label} ({', '.join(names[:_SHOWN])}{more})"
