"""Trace a custom loss with torch.fx, check the graph and encode it as plain data.

Tracing calls the loss once with proxy tensors and records the operations on them, so a loss may
only use what torch.fx can record. This is the only client module that imports torch, on first use.
"""

from __future__ import annotations

import inspect
import math
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Concatenate, TypeAlias

from tinkex.errors import ConfigError, InvalidInput
from tinkex.installation import install_command
from tinkex.types import CustomLossGraph, CustomLossInput, CustomLossInputRank, CustomLossNode

if TYPE_CHECKING:
    import torch
    import torch.fx

#: Loss of one datum: (logprobs, *named loss_fn_inputs) -> (loss, metrics by name).
PerDatumLossFn: TypeAlias = Callable[
    Concatenate["torch.Tensor", ...], tuple["torch.Tensor", Mapping[str, "torch.Tensor"]]
]

#: Maximum number of parameters of a loss, including logprobs.
MAX_INPUTS = 16
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
# The prefix prevents a loss from overwriting the server's metrics.
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
# fx records Python's arithmetic and indexing as functions of `_operator`.
_ALLOWED_MODULES = frozenset({"torch", "math", "operator", "_operator"})
_NON_TENSOR_METHODS = frozenset({"item", "numpy", "tolist"})
# Tracing patches functions of `math` process-wide; concurrent traces would not restore them.
_TRACE_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class TracedLoss:
    """The graph and the inputs of a traced loss."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    """`logprobs`, then the keys of `loss_fn_inputs` that the loss takes, in order."""
    graph: torch.fx.GraphModule


def load_torch() -> ModuleType:
    """Import torch with fx; raises ConfigError if torch is not installed."""
    try:
        import torch.fx
    except ImportError as error:
        raise ConfigError(f"custom losses need torch: {install_command('torch')}") from error
    return torch


def trace_loss(fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]) -> TracedLoss:
    """Trace a loss; raises InvalidInput if it cannot be expressed as a graph."""
    torch = load_torch()
    name = getattr(fn, "__name__", type(fn).__name__)
    inputs = _read_inputs(name, fn, input_ranks)
    try:
        with _TRACE_LOCK:
            graph = torch.fx.symbolic_trace(fn)
    except torch.fx.proxy.TraceError as error:
        raise InvalidInput(
            f"custom loss {name!r} has control flow that depends on tensor values (if, while, for, "
            f"and, or, assert), which cannot be traced; use torch.where and sums instead: {error}"
        ) from error
    except Exception as error:  # the loss is user code and may raise anything
        reason = " ".join(str(error).split())
        raise InvalidInput(
            f"custom loss {name!r} cannot be traced: {type(error).__name__}: {reason}; use only "
            "torch and math inside"
        ) from error
    for node in graph.graph.nodes:
        _check_node(name, node)
    return TracedLoss(name, inputs, graph)


def encode_graph(graph: torch.fx.GraphModule) -> CustomLossGraph:
    """Encode a graph in the server's format."""
    nodes = [
        CustomLossNode(
            op=node.op,
            name=node.name,
            target=_encode_target(node),
            args=[_encode(arg) for arg in node.args],
            kwargs={key: _encode(arg) for key, arg in node.kwargs.items()},
        )
        for node in graph.graph.nodes
    ]
    return CustomLossGraph(nodes=nodes)


def _read_inputs(
    name: str, fn: Callable[..., object], input_ranks: Mapping[str, CustomLossInputRank]
) -> tuple[CustomLossInput, ...]:
    try:
        params = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"custom loss {fn!r:.80} has no readable parameters") from error
    names = [param.name for param in params]
    if names[:1] != ["logprobs"]:
        raise InvalidInput(
            f"custom loss {name!r} takes {names}; its first parameter must be logprobs, and the "
            "others must name loss_fn_inputs"
        )
    if len(params) > MAX_INPUTS:
        raise InvalidInput(
            f"custom loss {name!r} takes {len(params)} parameters; at most {MAX_INPUTS} are allowed"
        )
    for param in params:
        _check_parameter(name, param)
    if not isinstance(input_ranks, Mapping) or set(input_ranks) != set(names):
        given = list(input_ranks) if isinstance(input_ranks, Mapping) else input_ranks
        raise InvalidInput(f"input_ranks of custom loss {name!r} has {given!r}; expected {names}")
    return tuple(_read_input(name, key, input_ranks[key]) for key in names)


def _check_parameter(name: str, param: inspect.Parameter) -> None:
    if not _INPUT_NAME.fullmatch(param.name):
        raise InvalidInput(
            f"custom loss {name!r} has a parameter {param.name!r}; a name must have 1 to 64 "
            "lowercase letters, digits or _ and must not begin with a digit"
        )
    if param.kind not in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD):
        raise InvalidInput(
            f"custom loss {name!r} has a parameter {str(param)!r} that is {param.kind.description};"
            " only plain positional ones are allowed"
        )
    if param.default is not param.empty:
        raise InvalidInput(
            f"custom loss {name!r} has a default in {str(param)!r}; remove it, every datum must "
            "have the input"
        )


def _read_input(name: str, key: str, rank: CustomLossInputRank) -> CustomLossInput:
    allowed = (1, 2) if key == "logprobs" else (0, 1, 2)
    if rank not in allowed:
        raise InvalidInput(
            f"input_ranks[{key!r}] of custom loss {name!r} is {rank!r}; expected one of {allowed}"
        )
    return CustomLossInput(name=key, rank=rank)


def _check_node(name: str, node: torch.fx.Node) -> None:
    if node.op == "call_function":
        _check_function(name, node.target)
    elif node.op == "call_method":
        _check_method(name, str(node.target))
    elif node.op == "call_module":
        raise InvalidInput(
            f"custom loss {name!r} calls the module {node.target!r}; use functions, such as those "
            "of torch.nn.functional"
        )
    elif node.op == "get_attr":
        raise InvalidInput(
            f"custom loss {name!r} captures a tensor ({node.target!r}); use plain numbers, or pass "
            "it in loss_fn_inputs"
        )
    elif node.op == "output":
        _check_output(name, node.args[0])


def _check_function(name: str, function: object) -> None:
    module = getattr(function, "__module__", None) or "an unknown module"
    # Reading an attribute such as x.shape is recorded as a call of the builtin getattr.
    if function is not getattr and module.split(".")[0] not in _ALLOWED_MODULES:
        called = getattr(function, "__qualname__", function)
        raise InvalidInput(
            f"custom loss {name!r} calls {called} of {module}; only torch and math are allowed"
        )


def _check_method(name: str, method: str) -> None:
    if not hasattr(load_torch().Tensor, method):
        raise InvalidInput(f"custom loss {name!r} calls {method}(), which tensors do not have")
    if method == "backward":
        raise InvalidInput(f"custom loss {name!r} calls backward(); return the loss instead")
    if method in _NON_TENSOR_METHODS:
        raise InvalidInput(
            f"custom loss {name!r} calls {method}(), which returns no tensor; keep every value a "
            "tensor"
        )


def _check_output(name: str, output: object) -> None:
    traced = load_torch().fx.Node
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise InvalidInput(f"custom loss {name!r} returns {output!r:.80}; expected (loss, metrics)")
    loss, metrics = output
    if not isinstance(loss, traced):
        raise InvalidInput(f"custom loss {name!r} returns the loss {loss!r:.80}; expected a tensor")
    if not isinstance(metrics, dict):
        raise InvalidInput(
            f"custom loss {name!r} returns the metrics {metrics!r:.80}; expected a dict"
        )
    for key, value in metrics.items():
        if not isinstance(key, str) or not _METRIC_NAME.fullmatch(key):
            raise InvalidInput(
                f"custom loss {name!r} has a metric {key!r}; expected custom/<name>:sum or "
                "custom/<name>:mean with a name of 1 to 64 lowercase letters, digits or _ . / -"
            )
        if not isinstance(value, traced):
            raise InvalidInput(
                f"metric {key!r} of custom loss {name!r} is {value!r:.80}; expected a tensor"
            )


def _encode_target(node: torch.fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    # A private function of fx, but the only source of the names that the server expects.
    name: str = load_torch().fx.node._get_qualified_name(node.target)
    return f"operator.{name.removeprefix('_operator.')}" if name.startswith("_operator.") else name


def _encode(arg: object) -> object:
    if isinstance(arg, load_torch().fx.Node):
        return {"ref": arg.name}
    if isinstance(arg, list):
        return [_encode(item) for item in arg]
    if isinstance(arg, tuple):
        return {"tuple": [_encode(item) for item in arg]}
    if isinstance(arg, dict) and all(isinstance(key, str) for key in arg):
        return {"dict": {key: _encode(item) for key, item in arg.items()}}
    if isinstance(arg, slice):
        return {"slice": [_encode(bound) for bound in (arg.start, arg.stop, arg.step)]}
    return _encode_constant(arg)


def _encode_constant(arg: object) -> object:
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if isinstance(arg, bool | int | float | str | None):
        return arg
    if arg is Ellipsis:
        return {"ellipsis": True}
    torch = load_torch()
    for kind in ("dtype", "device", "layout", "memory_format"):
        if isinstance(arg, getattr(torch, kind)):
            return {kind: str(arg).removeprefix("torch.")}
    raise InvalidInput(
        f"a custom loss uses the constant {arg!r:.80}, a {type(arg).__name__}, which cannot be sent"
    )
