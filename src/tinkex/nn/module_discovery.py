"""What a model is made of, found by watching it run once: its linear maps, and who reads what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tinkex.errors import ConfigError
from tinkex.nn.lora_layout import TargetKind

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
"""What a config may call its layers."""
#: Words in a module's name within its layer that say what part of the layer it is.
_KIND_MARKERS = {
    TargetKind.ATTENTION: ("attn", "attention"),
    TargetKind.MLP: ("mlp", "feed_forward", "feedforward", "ffn", "moe", "expert"),
}
#: Maps of a layer's MLP that some models give to the layer itself.
_BARE_MLP_NAMES = frozenset({"fc1", "fc2", "fc_in", "fc_out"})
#: Maps that choose experts; they are not adapted.
_ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate", "classifier"})


class LinearGroupSpec(NamedTuple):
    """Linear maps of one module that read the same input."""

    kind: TargetKind
    parent_path: str
    """The module's name in the model."""
    parent: nn.Module
    names: tuple[str, ...]
    """The maps' names in the module, in the order in which they are called."""

    @property
    def members(self) -> list[nn.Module]:
        """The maps."""
        return [getattr(self.parent, name) for name in self.names]


class NamedChild(NamedTuple):
    """A module inside a layer."""

    parent_in_layer: str
    """Its parent's name in the layer."""
    parent_path: str
    """Its parent's name in the model."""
    parent: nn.Module
    name: str
    module: nn.Module


@dataclass(slots=True, eq=False)
class _ObservedLinear:
    """A linear map that may be adapted, and what it was called with."""

    kind: TargetKind
    child: NamedChild
    inputs: list[Tensor]


class ModuleDiscovery:
    """Watches the linear maps of a model's layers while it runs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = find_layers(model)
        self._candidates = list(_adaptable_linears(iter_children(model, self.layers)))
        self._call_order: list[_ObservedLinear] = []
        self._stack = ExitStack()

    def __enter__(self) -> ModuleDiscovery:
        for one in self._candidates:
            hook = one.child.module.register_forward_pre_hook(
                lambda _, args, one=one: self._record_input(one, args)
            )
            self._stack.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def linear_groups(self, lengths: Sequence[int]) -> list[LinearGroupSpec]:
        """What was called, in order, for texts of some lengths; nothing else is adapted."""
        for one in self._call_order:
            rows = [x.numel() // x.shape[-1] for x in one.inputs]
            if rows != list(lengths):
                raise ConfigError(
                    f"{one.child.parent_path}.{one.child.name} cannot be adapted: it was given "
                    f"{rows} "
                    f"rows for texts of {list(lengths)} tokens, expected every token once"
                )
        found = [
            _build_group(list(members))
            for _, members in groupby(
                self._call_order, lambda one: (one.child.parent_path, id(one.inputs[0]))
            )
        ]
        # Who replaces a module lets go of its weights; nothing here may hold on to them.
        self._candidates.clear()
        self._call_order.clear()
        return found

    def _record_input(self, one: _ObservedLinear, args: tuple[Any, ...]) -> None:
        # The tensors are held, so that no two of them can have the same id.
        if not one.inputs:
            self._call_order.append(one)
        one.inputs.append(args[0])


def _build_group(members: Sequence[_ObservedLinear]) -> LinearGroupSpec:
    first = members[0]
    names = tuple(one.child.name for one in members)
    return LinearGroupSpec(first.kind, first.child.parent_path, first.child.parent, names)


def find_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The layers of a model's decoder; raises for what is known to mix tokens otherwise."""
    decoder: Any = model.get_decoder()
    num_layers = decoder.config.num_hidden_layers
    kinds = set(getattr(decoder.config, "layer_types", None) or ()) - ATTENTION_KINDS
    if kinds:
        raise unsupported_model_error(model, f"it has layers of {' and '.join(sorted(kinds))}")
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    layers = next((list(found) for found in lists if len(found) == num_layers), None)
    if layers is None:
        raise unsupported_model_error(model, f"its decoder has no list of {num_layers} layers")
    for module in (module for layer in layers for module in layer.modules()):
        if isinstance(module, (nn.Conv1d, nn.RNNBase)):
            raise unsupported_model_error(
                model, f"a {type(module).__name__} in its layers mixes tokens"
            )
    return layers


def unsupported_model_error(model: PreTrainedModel, reason: str) -> ConfigError:
    """Why a model cannot be taken in."""
    return ConfigError(
        f"{type(model).__name__} cannot be hosted: {reason}; only models whose tokens see each "
        "other through attention alone can be"
    )


def target_kind(path: str, name: str) -> TargetKind | None:
    """What part a linear map is, by its module's path within the layer and its own name."""
    words = path.lower().split(".")
    if name in _ROUTER_NAMES or words[-1] in _ROUTER_NAMES:
        return None
    for part, marks in _KIND_MARKERS.items():
        if any(mark in word for mark in marks for word in words):
            return part
    return TargetKind.MLP if not path and name in _BARE_MLP_NAMES else None


def iter_children(model: PreTrainedModel, layers: Sequence[nn.Module]) -> Iterator[NamedChild]:
    """Every module inside the layers."""
    paths = {module: path for path, module in model.named_modules()}
    for layer in layers:
        for within, parent in layer.named_modules():
            for name, module in parent.named_children():
                yield NamedChild(within, paths[parent], parent, name, module)


def _adaptable_linears(found: Iterator[NamedChild]) -> Iterator[_ObservedLinear]:
    for child in found:
        part = target_kind(child.parent_in_layer, child.name)
        if part is not None and isinstance(child.module, (nn.Linear, Conv1D)):
            yield _ObservedLinear(part, child, [])
