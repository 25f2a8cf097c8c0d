"""Discovery of a model's linear layers by observing one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tinkex.errors import ConfigError
from tinkex.nn.lora_layout import TargetKind

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
"""Layer types of a config that are supported."""
#: Substrings of a module's path within its layer that identify its kind.
_KIND_MARKERS = {
    TargetKind.ATTENTION: ("attn", "attention"),
    TargetKind.MLP: ("mlp", "feed_forward", "feedforward", "ffn", "moe", "expert"),
}
#: MLP linears that some models place directly in the layer.
_BARE_MLP_NAMES = frozenset({"fc1", "fc2", "fc_in", "fc_out"})
#: Linear layers that route to experts; they are not adapted.
_ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate", "classifier"})


class LinearGroupSpec(NamedTuple):
    """Linear layers of one module that read the same input."""

    kind: TargetKind
    parent_path: str
    """The module's path in the model."""
    parent: nn.Module
    names: tuple[str, ...]
    """Names of the linear layers in the module, in call order."""

    @property
    def members(self) -> list[nn.Module]:
        """The linear layers."""
        return [getattr(self.parent, name) for name in self.names]


class NamedChild(NamedTuple):
    """A module inside a decoder layer."""

    parent_in_layer: str
    """The parent's path within the layer."""
    parent_path: str
    """The parent's path in the model."""
    parent: nn.Module
    name: str
    module: nn.Module


@dataclass(slots=True, eq=False)
class _ObservedLinear:
    """A linear layer that may be adapted, and the inputs of its calls."""

    kind: TargetKind
    child: NamedChild
    inputs: list[Tensor]


class ModuleDiscovery:
    """Records the calls of linear layers while the model runs inside the context."""

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
        """Group the called linear layers by input; each must have seen every token once.

        `lengths` are the lengths of the sequences that the model ran.
        """
        for one in self._call_order:
            rows = [x.numel() // x.shape[-1] for x in one.inputs]
            if rows != list(lengths):
                raise ConfigError(
                    f"{one.child.parent_path}.{one.child.name} cannot be adapted: it was "
                    f"given {rows} rows for texts of {list(lengths)} tokens, expected every token "
                    "once"
                )
        groups = [
            _build_group(list(members))
            for _, members in groupby(
                self._call_order, lambda one: (one.child.parent_path, id(one.inputs[0]))
            )
        ]
        # Release the modules, so that replacing them frees their weights.
        self._candidates.clear()
        self._call_order.clear()
        return groups

    def _record_input(self, one: _ObservedLinear, args: tuple[Tensor, ...]) -> None:
        # Holding the tensors keeps their ids unique.
        if not one.inputs:
            self._call_order.append(one)
        one.inputs.append(args[0])


def _build_group(members: Sequence[_ObservedLinear]) -> LinearGroupSpec:
    first = members[0]
    names = tuple(one.child.name for one in members)
    return LinearGroupSpec(first.kind, first.child.parent_path, first.child.parent, names)


def find_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """Return the decoder layers; raises ConfigError if tokens mix other than by attention."""
    decoder: PreTrainedModel = model.get_decoder()
    num_layers = decoder.config.num_hidden_layers
    kinds = set(getattr(decoder.config, "layer_types", None) or ()) - ATTENTION_KINDS
    if kinds:
        raise unsupported_model_error(model, f"unsupported layer types: {', '.join(sorted(kinds))}")
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    layers = next((list(modules) for modules in lists if len(modules) == num_layers), None)
    if layers is None:
        raise unsupported_model_error(model, f"its decoder has no list of {num_layers} layers")
    for module in (module for layer in layers for module in layer.modules()):
        if isinstance(module, (nn.Conv1d, nn.RNNBase)):
            raise unsupported_model_error(
                model, f"a {type(module).__name__} in its layers mixes tokens"
            )
    return layers


def unsupported_model_error(model: PreTrainedModel, reason: str) -> ConfigError:
    """Build the error for a model that cannot be hosted."""
    return ConfigError(
        f"{type(model).__name__} cannot be hosted: {reason}; only models whose tokens interact "
        "through attention alone are supported"
    )


def target_kind(path: str, name: str) -> TargetKind | None:
    """Classify a linear layer by its module's path within the layer and its name."""
    words = path.lower().split(".")
    if name in _ROUTER_NAMES or words[-1] in _ROUTER_NAMES:
        return None
    for kind, markers in _KIND_MARKERS.items():
        if any(marker in word for marker in markers for word in words):
            return kind
    return TargetKind.MLP if not path and name in _BARE_MLP_NAMES else None


def iter_children(model: PreTrainedModel, layers: Sequence[nn.Module]) -> Iterator[NamedChild]:
    """Yield every module inside the layers."""
    paths = {module: path for path, module in model.named_modules()}
    for layer in layers:
        for within, parent in layer.named_modules():
            for name, module in parent.named_children():
                yield NamedChild(within, paths[parent], parent, name, module)


def _adaptable_linears(children: Iterator[NamedChild]) -> Iterator[_ObservedLinear]:
    for child in children:
        kind = target_kind(child.parent_in_layer, child.name)
        if kind is not None and isinstance(child.module, (nn.Linear, Conv1D)):
            yield _ObservedLinear(kind, child, [])
