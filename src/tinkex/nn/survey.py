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
from tinkex.nn.sites import Part

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
"""What a config may call its layers."""
#: Words in a module's name within its layer that say what part of the layer it is.
_PARTS = {
    Part.ATTENTION: ("attn", "attention"),
    Part.MLP: ("mlp", "feed_forward", "feedforward", "ffn", "moe", "expert"),
}
#: Maps of a layer's MLP that some models give to the layer itself.
_BARE_MLP = frozenset({"fc1", "fc2", "fc_in", "fc_out"})
#: Maps that choose experts; they are not adapted.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "classifier"})


class Group(NamedTuple):
    """Linear maps of one module that read the same input."""

    part: Part
    path: str
    """The module's name in the model."""
    parent: nn.Module
    names: tuple[str, ...]
    """The maps' names in the module, in the order in which they are called."""

    @property
    def members(self) -> list[nn.Module]:
        """The maps."""
        return [getattr(self.parent, name) for name in self.names]


class Child(NamedTuple):
    """A module inside a layer."""

    within: str
    """Its parent's name in the layer."""
    path: str
    """Its parent's name in the model."""
    parent: nn.Module
    name: str
    module: nn.Module


@dataclass(slots=True, eq=False)
class _Seen:
    """A linear map that may be adapted, and what it was called with."""

    part: Part
    child: Child
    inputs: list[Tensor]


class Survey:
    """Watches the linear maps of a model's layers while it runs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = find_layers(model)
        self._seen = list(_adaptable(children(model, self.layers)))
        self._order: list[_Seen] = []
        self._stack = ExitStack()

    def __enter__(self) -> Survey:
        for one in self._seen:
            hook = one.child.module.register_forward_pre_hook(
                lambda _, args, one=one: self._note(one, args)
            )
            self._stack.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def groups(self, lengths: Sequence[int]) -> list[Group]:
        """What was called, in order, for texts of some lengths; nothing else is adapted."""
        for one in self._order:
            rows = [x.numel() // x.shape[-1] for x in one.inputs]
            if rows != list(lengths):
                raise ConfigError(
                    f"{one.child.path}.{one.child.name} cannot be adapted: it was given {rows} "
                    f"rows for texts of {list(lengths)} tokens, expected every token once"
                )
        found = [
            _group(list(members))
            for _, members in groupby(self._order, lambda one: (one.child.path, id(one.inputs[0])))
        ]
        # Who replaces a module lets go of its weights; nothing here may hold on to them.
        self._seen.clear()
        self._order.clear()
        return found

    def _note(self, one: _Seen, args: tuple[Any, ...]) -> None:
        # The tensors are held, so that no two of them can have the same id.
        if not one.inputs:
            self._order.append(one)
        one.inputs.append(args[0])


def _group(members: Sequence[_Seen]) -> Group:
    first = members[0]
    names = tuple(one.child.name for one in members)
    return Group(first.part, first.child.path, first.child.parent, names)


def find_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The layers of a model's decoder; raises for what is known to mix tokens otherwise."""
    decoder: Any = model.get_decoder()
    num_layers = decoder.config.num_hidden_layers
    kinds = set(getattr(decoder.config, "layer_types", None) or ()) - ATTENTION_KINDS
    if kinds:
        raise refusal(model, f"it has layers of {' and '.join(sorted(kinds))}")
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    layers = next((list(found) for found in lists if len(found) == num_layers), None)
    if layers is None:
        raise refusal(model, f"its decoder has no list of {num_layers} layers")
    for module in (module for layer in layers for module in layer.modules()):
        if isinstance(module, (nn.Conv1d, nn.RNNBase)):
            raise refusal(model, f"a {type(module).__name__} in its layers mixes tokens")
    return layers


def refusal(model: PreTrainedModel, reason: str) -> ConfigError:
    """Why a model cannot be taken in."""
    return ConfigError(
        f"{type(model).__name__} cannot be hosted: {reason}; only models whose tokens see each "
        "other through attention alone can be"
    )


def part_of(path: str, name: str) -> Part | None:
    """What part a linear map is, by its module's path within the layer and its own name."""
    words = path.lower().split(".")
    if name in _ROUTERS or words[-1] in _ROUTERS:
        return None
    for part, marks in _PARTS.items():
        if any(mark in word for mark in marks for word in words):
            return part
    return Part.MLP if not path and name in _BARE_MLP else None


def children(model: PreTrainedModel, layers: Sequence[nn.Module]) -> Iterator[Child]:
    """Every module inside the layers."""
    paths = {module: path for path, module in model.named_modules()}
    for layer in layers:
        for within, parent in layer.named_modules():
            for name, module in parent.named_children():
                yield Child(within, paths[parent], parent, name, module)


def _adaptable(found: Iterator[Child]) -> Iterator[_Seen]:
    for child in found:
        part = part_of(child.within, child.name)
        if part is not None and isinstance(child.module, (nn.Linear, Conv1D)):
            yield _Seen(part, child, [])
